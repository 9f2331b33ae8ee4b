-- Renew the lease of one holder at one epoch.
-- KEYS[1] leader   hash: holder, epoch, since (us), lease (ms), step_down; expires with the lease
-- KEYS[2] granted  high-water mark: the highest epoch ever granted, or given back + 1; no TTL
-- ARGV[1] holder
-- ARGV[2] lease, milliseconds
-- ARGV[3] epoch
-- ARGV[4] 1 if the holder still trusts the lease, else 0: then a server that forgot the epoch grants nothing
-- Returns {'RENEWED', 1 if asked to step down else 0, now (us)} or {'LOST', epoch or '0', now (us), holder or ''}.
-- Guard: holder and epoch match; or nobody leads and no higher epoch was granted or given back since: then granted anew.
-- Time: the server's.
local clock = redis.call('TIME')
local now = string.format('%.0f', clock[1] * 1000000 + clock[2])
local holder, epoch, step_down = unpack(redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'step_down'))
local mark = tonumber(redis.call('GET', KEYS[2]) or 0)

if holder == ARGV[1] and epoch == ARGV[3] then
    redis.call('HSET', KEYS[1], 'lease', ARGV[2])
elseif not holder and mark == tonumber(ARGV[3]) then
    -- Lapsed, and nobody led since.
    redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', ARGV[3], 'since', now, 'lease', ARGV[2])
elseif (not holder or holder == '') and mark <= tonumber(ARGV[3]) and ARGV[4] == '1' then
    -- Wiped, or kept free for this leader (see acquire).
    redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'epoch', ARGV[3], 'since', now, 'lease', ARGV[2])
else
    return {'LOST', epoch or '0', now, holder or ''}
end

if mark < tonumber(ARGV[3]) then
    redis.call('SET', KEYS[2], ARGV[3])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {'RENEWED', step_down == ARGV[3] and 1 or 0, now}
