-- A leader that lived through a wipe writes its cursors back, before it does anything else.
-- ARGV[5] what this release writes   ARGV[6] what it needs   ARGV[7] number of cursors; then for each: entry, cursor
-- Returns a verdict; DECIDED where the store is not wiped. Guard: no later leader is in office.
if fence > epoch then return 'STALE' end
if redis.call('EXISTS', KEYS[2]) == 1 then return 'DECIDED' end
for i = 1, tonumber(ARGV[7]) do
    redis.call('HSET', KEYS[3], ARGV[6 + 2 * i], ARGV[7 + 2 * i])
end
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'written', ARGV[5], 'needs', ARGV[6])
note('wiped', '', '', '', ARGV[7], 'cursors written back')
return 'DONE'
