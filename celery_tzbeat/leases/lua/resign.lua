-- Give the lease back and tell the standbys.
-- KEYS[1] leader   hash: holder, epoch, since (us), lease (ms), step_down; expires with the lease
-- KEYS[2] granted  high-water mark: the highest epoch ever granted, or given back + 1; no TTL
-- KEYS[3] wake     channel
-- ARGV[1] holder
-- ARGV[2] epoch
-- ARGV[3] message
-- Returns 1, or 0 if the lease is not this holder's at this epoch.
-- Guard: holder and epoch match. The mark goes up by one: a renewal still on its way finds it higher and is refused.
local holder, epoch = unpack(redis.call('HMGET', KEYS[1], 'holder', 'epoch'))
if holder ~= ARGV[1] or epoch ~= ARGV[2] then
    return 0
end
local mark = tonumber(redis.call('GET', KEYS[2]) or 0)
redis.call('SET', KEYS[2], string.format('%.0f', math.max(mark, tonumber(ARGV[2]) + 1)))
redis.call('DEL', KEYS[1])
-- A user without rights to the channel is no error: standbys ask by themselves, within a second.
redis.pcall('PUBLISH', KEYS[3], ARGV[3])
return 1
