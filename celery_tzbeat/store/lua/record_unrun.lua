-- Record rows of occurrences that will not run, and move their cursors (state table line 4): one record a row.
-- ARGV[5] number of rows; then for each: event, entry, first, last, count, reason, cursor
-- Returns a verdict per row. Guard: fence; the last nominal is neither ahead of the store's clock nor decided.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
local answers = {}
for i = 1, count do
    local event, entry, first, last, size, reason, cursor = unpack(ARGV, 7 * i - 1, 7 * i + 5)
    if early(last) then
        answers[i] = 'EARLY'
    elseif decided(entry, last) then
        answers[i] = 'DECIDED'
    else
        redis.call('HSET', KEYS[3], entry, cursor)
        redis.call('HSET', KEYS[4], entry, last .. '|' .. event .. '|' .. text(now))
        note(event, entry, first, last, size, reason)
        answers[i] = 'DONE'
    end
end
return answers
