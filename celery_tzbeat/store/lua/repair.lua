-- Set cursors back that stand ahead of the store's clock; done marks keep what was sent from being sent again.
-- ARGV[5] number of cursors; then for each: entry, cursor
-- Returns a verdict. Guard: fence; only a cursor further ahead than the skew allowed is touched.
local refusal = refused()
if refusal then return refusal end
for i = 1, tonumber(ARGV[5]) do
    local entry, cursor = ARGV[4 + 2 * i], ARGV[5 + 2 * i]
    local at = cursor_of(entry)
    if at ~= nil and early(at) then
        redis.call('HSET', KEYS[3], entry, cursor)
        note('repaired', entry, string.format('%.0f', at), '', 0, 'the cursor was ahead of the store')
    end
end
return 'DONE'
