-- Record and push a batch of occurrences (state table lines 1, 7): nobody can come between the record and the message.
-- KEYS[8...] per occurrence: occurrence record, open of the entry, done hash; then every queue key
-- ARGV[5] number of occurrences; then for each of them:
--   key, entry, nominal, cursor, bucket number, done field, detail,
--   policy (empty: untracked, settled as `sent`), start_within in ms, eta in ms or empty, alone 0/1, payload,
--   number of commands, and for each command: number of words, words ...
-- Returns a verdict per occurrence; FAULT is followed by the server's words in the same string.
-- Guard: fence; the nominal is neither ahead of the store's clock nor decided (not behind the cursor, no done mark, not open),
-- or the occurrence waits; where it must be alone, no other of the entry is open (HELD).
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
if fence < epoch then redis.call('SET', KEYS[1], ARGV[1]) end

-- Queue commands come first: an error leaves a message without a record (a duplicate), never a record without a message.
local function push(at, commands)
    for _ = 1, commands do
        local words = tonumber(ARGV[at])
        local reply = redis.pcall(unpack(ARGV, at + 1, at + words))
        if type(reply) == 'table' and reply.err then return reply.err end
        at = at + 1 + words
    end
    return nil
end

local function behind(at, commands)
    for _ = 1, commands do at = at + 1 + tonumber(ARGV[at]) end
    return at
end

local answers = {}
local at = 6
for i = 1, count do
    local record, of_entry, done = KEYS[5 + 3 * i], KEYS[6 + 3 * i], KEYS[7 + 3 * i]
    local key, entry, nominal, cursor, number, field, detail, policy, within, eta, alone, payload, commands =
        unpack(ARGV, at, at + 12)
    at = at + 13
    local no, waits = refused_opening(record, done, entry, nominal, field, cursor)
    if not no and alone == '1' and held(record, of_entry, key) then no = 'HELD' end
    local fault = not no and push(at, commands)
    if no then
        answers[i] = no
    elseif fault then
        answers[i] = 'FAULT ' .. fault
    else
        if policy == '' then
            settled(done, field, 'sent', 1, 0, entry, nominal, detail)
        else
            redis.call('HSET', record, 'state', 'published', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
                'dispatch', 1, 'retries', 0, 'payload', payload, 'number', number,
                'field', field, 'detail', detail, 'policy', policy, 'within', within, 'eta', eta)
            stand_open(of_entry, key, late_after(eta, within))
            note('published', entry, nominal, nominal, 1, detail)
        end
        if not waits then redis.call('HSET', KEYS[3], entry, cursor) end
        answers[i] = 'DONE'
    end
    at = behind(at, commands)
end
return answers
