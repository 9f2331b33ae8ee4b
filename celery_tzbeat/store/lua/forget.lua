-- Drop what is kept of entries that leaders have led without for `retention`.
-- KEYS[8] paused   ARGV[5] number of entries, ARGV[6...] entries
-- Returns a verdict. Guard: fence.
local refusal = refused()
if refusal then return refusal end
for i = 6, 5 + tonumber(ARGV[5]) do
    if redis.call('HDEL', KEYS[3], ARGV[i]) == 1 then note('forgotten', ARGV[i], '', '', 0, 'unlisted') end
    redis.call('HDEL', KEYS[4], ARGV[i])
    redis.call('HDEL', KEYS[8], ARGV[i])
end
return 'DONE'
