-- Record that a claimed occurrence was published (state table line 9); untracked, it is settled as `sent`.
-- KEYS[6] occurrence record   KEYS[7] open   KEYS[8] open of the entry   KEYS[9] done hash
-- ARGV[5] key, entry, nominal, done field
-- Returns a verdict; DECIDED where there is no open claim: it was confirmed or settled before. Guard: fence.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, field = unpack(ARGV, 5, 8)
if redis.call('HGET', KEYS[6], 'state') ~= 'claimed' then return 'DECIDED' end
local dispatch = redis.call('HGET', KEYS[6], 'dispatch')
redis.call('DEL', KEYS[6])
redis.call('ZREM', KEYS[7], key)
redis.call('SREM', KEYS[8], key)
settled(KEYS[9], field, 'sent', dispatch, entry, nominal, '')
return 'DONE'
