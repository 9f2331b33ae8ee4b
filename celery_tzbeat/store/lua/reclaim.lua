-- Take over an open claim, to send it again under the same task id (state table line 11).
-- KEYS[8] occurrence record
-- ARGV[5] entry, nominal
-- Returns {'DONE', the record's fields and values ...} or {verdict}; DECIDED where there is no open claim.
-- Guard: fence; a claim of this very epoch is in this leader's own hands.
local refusal = refused()
if refusal then return { refusal } end
local state, claimed_by = unpack(redis.call('HMGET', KEYS[8], 'state', 'epoch'))
if state ~= 'claimed' or tonumber(claimed_by) >= epoch then return { 'DECIDED' } end
redis.call('HSET', KEYS[8], 'epoch', ARGV[1])
note('reclaimed', ARGV[5], ARGV[6], ARGV[6], 1, claimed_by)
local answer = redis.call('HGETALL', KEYS[8])
table.insert(answer, 1, 'DONE')
return answer
