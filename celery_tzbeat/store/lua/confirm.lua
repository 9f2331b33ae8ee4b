-- Record that a batch of claimed occurrences was published (state table line 9); untracked, they are settled as `sent`.
-- KEYS[8...] per occurrence: occurrence record, open of the entry, done hash
-- ARGV[5] number of occurrences; then for each: key, entry, nominal, done field
-- Returns a verdict per occurrence; DECIDED where there is no open claim: a worker was faster, or it was settled before.
-- Guard: fence.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
local answers = {}
for i = 1, count do
    local record, of_entry, done = KEYS[5 + 3 * i], KEYS[6 + 3 * i], KEYS[7 + 3 * i]
    local key, entry, nominal, field = unpack(ARGV, 4 * i + 2, 4 * i + 5)
    local state, dispatch, retries, detail, policy, within, eta = unpack(redis.call('HMGET', record, 'state',
        'dispatch', 'retries', 'detail', 'policy', 'within', 'eta'))
    if state ~= 'claimed' then
        answers[i] = 'DECIDED'
    elseif policy then
        redis.call('HSET', record, 'state', 'published')
        redis.call('ZADD', open, text(late_after(eta, within)), key)
        note('published', entry, nominal, nominal, 1, detail)
        answers[i] = 'DONE'
    else
        close(record, of_entry, key)
        settled(done, field, 'sent', dispatch, retries or 0, entry, nominal, detail)
        answers[i] = 'DONE'
    end
end
return answers
