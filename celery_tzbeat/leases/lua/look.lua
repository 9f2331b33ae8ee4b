-- Say who leads; changes nothing.
-- KEYS[1] leader   hash: holder, epoch, since (us), lease (ms), step_down; expires with the lease
-- Returns {'FREE', now (us)} or {'HELD', epoch, now (us), holder, remaining (ms), since (us)}.
-- Guard: none. Time: the server's.
local clock = redis.call('TIME')
local now = string.format('%.0f', clock[1] * 1000000 + clock[2])
local holder, epoch, since, lease = unpack(redis.call('HMGET', KEYS[1], 'holder', 'epoch', 'since', 'lease'))
if not holder then
    return {'FREE', now}
end
local remaining = redis.call('PTTL', KEYS[1])
if remaining < 0 or remaining > tonumber(lease) then
    remaining = tonumber(lease)
end
return {'HELD', epoch, now, holder, remaining, since}
