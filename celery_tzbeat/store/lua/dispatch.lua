-- Record and push a batch of occurrences (state table line 1): nobody can come between the record and the message.
-- KEYS[6...] per occurrence: done hash, occurrence record; then every queue key
-- ARGV[5] number of occurrences; then for each of them:
--   entry, nominal, done field, cursor, detail, number of commands, and for each command: number of words, words ...
-- Returns a verdict per occurrence; FAULT is followed by the server's words in the same string.
-- Guard: fence; the nominal is neither ahead of the store's clock nor decided: not behind the cursor, no done mark, not open.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end
if fence < epoch then redis.call('SET', KEYS[1], ARGV[1]) end

-- Queue commands come first: an error leaves a message without a record (a duplicate), never a record without a message.
local function push(at, commands)
    local fault = nil
    for _ = 1, commands do
        local words = tonumber(ARGV[at])
        if not fault then
            local reply = redis.pcall(unpack(ARGV, at + 1, at + words))
            if type(reply) == 'table' and reply.err then fault = reply.err end
        end
        at = at + 1 + words
    end
    return at, fault
end

local function skip(at, commands)
    for _ = 1, commands do at = at + 1 + tonumber(ARGV[at]) end
    return at
end

local answers = {}
local at = 6
for i = 1, count do
    local done, record = KEYS[4 + 2 * i], KEYS[5 + 2 * i]
    local entry, nominal, field, cursor, detail, commands =
        ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4], tonumber(ARGV[at + 5])
    at = at + 6
    if early(nominal) then
        answers[i] = 'EARLY'
        at = skip(at, commands)
    elseif decided(entry, nominal) then
        answers[i] = 'DECIDED'
        at = skip(at, commands)
    elseif redis.call('HEXISTS', done, field) == 1 or redis.call('EXISTS', record) == 1 then
        redis.call('HSET', KEYS[3], entry, cursor)
        answers[i] = 'DECIDED'
        at = skip(at, commands)
    else
        local fault
        at, fault = push(at, commands)
        if fault then
            answers[i] = 'FAULT ' .. fault
        else
            redis.call('HSET', KEYS[3], entry, cursor)
            settled(done, field, 'sent', 1, entry, nominal, detail)
            answers[i] = 'DONE'
        end
    end
end
return answers
