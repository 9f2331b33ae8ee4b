-- A worker half says that it lives. Stands alone.
-- KEYS[1] workers   KEYS[2] this worker's key
-- ARGV[1] worker   ARGV[2] presence (JSON)   ARGV[3] its key lives for, ms   ARGV[4] it is remembered for, ms
-- Returns DONE. No guard: it is this worker's own.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.0f', now - tonumber(ARGV[4])))
return 'DONE'
