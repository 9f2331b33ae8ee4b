-- Record the right to publish a batch of occurrences over a broker that is not the store (state table lines 2, 7).
-- KEYS[8...] per occurrence: occurrence record, open of the entry, done hash
-- ARGV[5] number of occurrences; then for each: key, entry, nominal, cursor, payload, bucket number, done field, detail,
--   policy (empty: untracked), start_within in ms, eta in ms or empty, alone 0/1
-- Returns a verdict per occurrence. Guard: fence; the nominal is neither ahead of the store's clock nor decided, or the
-- occurrence waits; where it must be alone, no other of the entry is open (HELD).
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
if fence < epoch then redis.call('SET', KEYS[1], ARGV[1]) end
local answers = {}
for i = 1, count do
    local record, of_entry, done = KEYS[5 + 3 * i], KEYS[6 + 3 * i], KEYS[7 + 3 * i]
    local key, entry, nominal, cursor, payload, number, field, detail, policy, within, eta, alone =
        unpack(ARGV, 12 * i - 6, 12 * i + 5)
    local no, waits = refused_opening(record, done, entry, nominal, field, cursor)
    if not no and alone == '1' and held(record, of_entry, key) then no = 'HELD' end
    if no then
        answers[i] = no
    else
        redis.call('HSET', record, 'state', 'claimed', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
            'dispatch', 1, 'retries', 0, 'payload', payload, 'number', number, 'field', field, 'detail', detail)
        if policy ~= '' then redis.call('HSET', record, 'policy', policy, 'within', within, 'eta', eta) end
        stand_open(of_entry, key, claims_first(now))
        if not waits then redis.call('HSET', KEYS[3], entry, cursor) end
        note('claimed', entry, nominal, nominal, 1, detail)
        answers[i] = 'DONE'
    end
end
return answers
