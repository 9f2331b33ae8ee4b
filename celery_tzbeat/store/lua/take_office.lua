-- A leader's first script: raises the fence, so that no earlier leader writes from here on.
-- KEYS[8] paused
-- ARGV[5] what this release writes   ARGV[6] the highest `needs` it can serve   ARGV[7] what it may need   ARGV[8] holder
-- Returns {'STALE'}, {'NEEDS', needs} or {'DONE', time in microseconds, fresh 0/1, {entry, cursor ...}, {entry, pause ...}}.
-- Guard: the epoch is not lower than the fence; the schema does not need a newer release.
if fence > epoch then return { 'STALE' } end
local needs = tonumber(redis.call('HGET', KEYS[2], 'needs') or '0')
if needs > tonumber(ARGV[6]) then return { 'NEEDS', tostring(needs) } end
local fresh = redis.call('EXISTS', KEYS[2]) == 0
redis.call('SET', KEYS[1], ARGV[1])
local written = tonumber(redis.call('HGET', KEYS[2], 'written') or '0')
if written < tonumber(ARGV[5]) then redis.call('HSET', KEYS[2], 'written', ARGV[5]) end
if needs < tonumber(ARGV[7]) then redis.call('HSET', KEYS[2], 'needs', ARGV[7]) end
if fence < epoch then note('office', '', '', '', 0, ARGV[8]) end
return { 'DONE', string.format('%.0f', now_micros), fresh and '1' or '0', redis.call('HGETALL', KEYS[3]),
    redis.call('HGETALL', KEYS[8]) }
