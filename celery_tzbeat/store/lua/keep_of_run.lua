-- Keep a run's checkpoint or progress. Stands alone.
-- KEYS[1] occurrence record   ARGV[1] token, field, value
-- Returns 1, or 0 where the run is no longer this token's. Guard: token.
local state, token = unpack(redis.call('HMGET', KEYS[1], 'state', 'token'))
if state ~= 'running' or token ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1], ARGV[2], ARGV[3])
return 1
