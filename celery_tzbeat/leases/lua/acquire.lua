-- Bid for the lease.
-- KEYS[1] leader   hash: holder, epoch, since (us), lease (ms), step_down; expires with the lease
-- KEYS[2] granted  high-water mark: the highest epoch ever granted, or given back + 1; no TTL
-- ARGV[1] holder
-- ARGV[2] lease, milliseconds
-- ARGV[3] floor: the highest epoch the bidder ever saw, or 0
-- Returns {'GRANTED', epoch, now (us)} or {'HELD', epoch, now (us), holder, remaining (ms)}.
-- Guard: granted only if nobody leads, or the bidder already does (its last reply was lost).
-- Time: the server's.
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local now_text = string.format('%.0f', now)
local holder, epoch, lease = unpack(redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'lease'))
local mark = tonumber(redis.call('GET', KEYS[2]) or 0)

if holder == ARGV[1] then
    redis.call('HSET', KEYS[1], 'lease', ARGV[2])
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'GRANTED', epoch, now_text}
end

if not holder and mark < tonumber(ARGV[3]) then
    -- The server forgot an epoch that the bidder saw. Its leader may be alive: one lease for it to renew.
    redis.call('SET', KEYS[2], ARGV[3])
    redis.call('HSET', KEYS[1], 'holder', '', 'epoch', ARGV[3], 'since', now_text, 'lease', ARGV[2])
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {'HELD', ARGV[3], now_text, '', ARGV[2]}
end

if holder then
    local remaining = redis.call('PTTL', KEYS[1])
    if remaining < 0 or remaining > tonumber(lease) then
        -- The server's clock went back: nobody waits longer than the leader's own lease.
        remaining = tonumber(lease)
        redis.call('PEXPIRE', KEYS[1], remaining)
    end
    return {'HELD', epoch, now_text, holder, remaining}
end

-- The mark is not below the floor here.
local granted = string.format('%.0f', math.max(now, mark + 1))
redis.call('SET', KEYS[2], granted)
redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', granted, 'since', now_text, 'lease', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'GRANTED', granted, now_text}
