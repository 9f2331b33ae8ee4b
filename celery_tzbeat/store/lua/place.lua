-- Set cursors that no occurrence moves: of new, changed and unlisted entries.
-- ARGV[5] number of cursors; then for each: entry, cursor
-- Returns a verdict. Guard: fence; a cursor never goes back.
local function rule_of(text) return string.match(text, '^[^|]*|([^|]*)') end
local refusal = refused()
if refusal then return refusal end
for i = 1, tonumber(ARGV[5]) do
    local entry, cursor = ARGV[4 + 2 * i], ARGV[5 + 2 * i]
    local at = cursor_of(entry)
    if at == nil or at <= tonumber(string.match(cursor, '^%-?%d+')) then
        if at == nil then
            note('new', entry, '', '', 0, '')
        elseif rule_of(redis.call('HGET', KEYS[3], entry)) ~= rule_of(cursor) then
            note('changed', entry, string.format('%.0f', at), string.match(cursor, '^%-?%d+'), 0, '')
        elseif at < tonumber(string.match(cursor, '^%-?%d+')) then
            note('returned', entry, string.format('%.0f', at), string.match(cursor, '^%-?%d+'), 0, 'unlisted too long')
        end
        redis.call('HSET', KEYS[3], entry, cursor)
    end
end
return 'DONE'
