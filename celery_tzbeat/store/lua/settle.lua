-- Settle an open claim without a message: withdrawn, dead, lost ... (state table lines 10, 14, 29).
-- KEYS[6] occurrence record   KEYS[7] open   KEYS[8] open of the entry   KEYS[9] done hash   KEYS[10] dead
-- ARGV[5] key, entry, nominal, done field, state, reason, dead letter (empty: none)
-- Returns a verdict; DECIDED where there is no open claim. Guard: fence.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, field, state, reason, letter = unpack(ARGV, 5, 11)
local dispatch = redis.call('HGET', KEYS[6], 'dispatch')
if not dispatch then return 'DECIDED' end
if letter ~= '' then redis.call('HSET', KEYS[10], key, letter) end
redis.call('DEL', KEYS[6])
redis.call('ZREM', KEYS[7], key)
redis.call('SREM', KEYS[8], key)
settled(KEYS[9], field, state, dispatch, entry, nominal, reason)
return 'DONE'
