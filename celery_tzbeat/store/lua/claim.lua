-- Record the right to publish a batch of occurrences over a broker that is not the store (state table line 2).
-- KEYS[6] open; then per occurrence: occurrence record, open of the entry, done hash
-- ARGV[5] number of occurrences; then for each: key, entry, nominal, cursor, payload, bucket number, done field, detail
-- Returns a verdict per occurrence. Guard: fence; the nominal is neither ahead of the store's clock nor decided.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
if fence < epoch then redis.call('SET', KEYS[1], ARGV[1]) end
local answers = {}
for i = 1, count do
    local record, of_entry, done = KEYS[4 + 3 * i], KEYS[5 + 3 * i], KEYS[6 + 3 * i]
    local key, entry, nominal, cursor, payload, number, field, detail = unpack(ARGV, 8 * i - 2, 8 * i + 5)
    if early(nominal) then
        answers[i] = 'EARLY'
    elseif decided(entry, nominal) then
        answers[i] = 'DECIDED'
    elseif redis.call('EXISTS', record) == 1 or redis.call('HEXISTS', done, field) == 1 then
        redis.call('HSET', KEYS[3], entry, cursor)
        answers[i] = 'DECIDED'
    else
        redis.call('HSET', record, 'state', 'claimed', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
            'dispatch', 1, 'payload', payload, 'number', number, 'field', field, 'detail', detail)
        redis.call('ZADD', KEYS[6], now_millis, key)
        redis.call('SADD', of_entry, key)
        redis.call('HSET', KEYS[3], entry, cursor)
        note('claimed', entry, nominal, nominal, 1, detail)
        answers[i] = 'DONE'
    end
end
return answers
