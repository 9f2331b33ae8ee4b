-- A beat says that it lives.
-- KEYS[1] epoch   KEYS[2] schema   KEYS[3] beats   KEYS[4] this beat's key   KEYS[5] entries of this beat's fingerprint
-- ARGV[1] beat   ARGV[2] presence (JSON)   ARGV[3] lives for, ms
-- Returns {time in microseconds, fresh 0/1, epoch, entries known 0/1, needs}. No guard: it is this beat's own.
local time = redis.call('TIME')
local millis = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('SET', KEYS[4], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[3], string.format('%.0f', millis), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', string.format('%.0f', millis - tonumber(ARGV[3])))
return { string.format('%.0f', time[1] * 1000000 + time[2]), tostring(1 - redis.call('EXISTS', KEYS[2])),
    redis.call('GET', KEYS[1]) or '0', tostring(redis.call('PEXPIRE', KEYS[5], ARGV[3])),
    redis.call('HGET', KEYS[2], 'needs') or '0' }
