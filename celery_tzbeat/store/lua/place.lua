-- Set cursors that no occurrence moves: of new, changed and unlisted entries.
-- ARGV[5] number of cursors; then for each: entry, cursor
-- Returns a verdict. Guard: fence; a cursor never goes back.
local refusal = refused()
if refusal then return refusal end
for i = 1, tonumber(ARGV[5]) do
    local entry, cursor = ARGV[4 + 2 * i], ARGV[5 + 2 * i]
    local at = cursor_of(entry)
    if at == nil or at <= tonumber(string.match(cursor, '^%-?%d+')) then
        if at == nil then note('new', entry, '', '', 0, '') end
        redis.call('HSET', KEYS[3], entry, cursor)
    end
end
return 'DONE'
