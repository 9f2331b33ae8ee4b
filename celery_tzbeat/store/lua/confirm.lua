-- Record that a batch of claimed occurrences was published (state table line 9); untracked, they are settled as `sent`.
-- KEYS[6] open; then per occurrence: occurrence record, open of the entry, done hash
-- ARGV[5] number of occurrences; then for each: key, entry, nominal, done field
-- Returns a verdict per occurrence; DECIDED where there is no open claim: confirmed or settled before. Guard: fence.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
local answers = {}
for i = 1, count do
    local record, of_entry, done = KEYS[4 + 3 * i], KEYS[5 + 3 * i], KEYS[6 + 3 * i]
    local key, entry, nominal, field = unpack(ARGV, 4 * i + 2, 4 * i + 5)
    local state, dispatch, detail = unpack(redis.call('HMGET', record, 'state', 'dispatch', 'detail'))
    if state == 'claimed' then
        redis.call('DEL', record)
        redis.call('ZREM', KEYS[6], key)
        redis.call('SREM', of_entry, key)
        settled(done, field, 'sent', dispatch, entry, nominal, detail)
        answers[i] = 'DONE'
    else
        answers[i] = 'DECIDED'
    end
end
return answers
