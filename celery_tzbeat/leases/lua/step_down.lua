-- Ask the leader of one epoch to step down: it resigns at its next renewal.
-- KEYS[1] leader   hash: holder, epoch, since (us), lease (ms), step_down; expires with the lease
-- KEYS[2] wake     channel
-- ARGV[1] epoch
-- ARGV[2] message
-- Returns 1, or 0 if that epoch does not lead.
-- Guard: somebody holds the lease at this epoch.
local holder, epoch = unpack(redis.call('HMGET', KEYS[1], 'holder', 'epoch'))
if not holder or holder == '' or epoch ~= ARGV[1] then
    return 0
end
redis.call('HSET', KEYS[1], 'step_down', ARGV[1])
-- A user without rights to the channel is no error: standbys ask by themselves, within a second.
redis.pcall('PUBLISH', KEYS[2], ARGV[2])
return 1
