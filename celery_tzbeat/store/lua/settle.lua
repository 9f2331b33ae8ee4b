-- Settle an open claim that is not sent: withdrawn, dead (state table lines 10, 29).
-- KEYS[8] occurrence record   KEYS[9] open of the entry   KEYS[10] done hash   KEYS[11] dead
-- ARGV[5] key, entry, nominal, done field, state, reason, dead letter (empty: none)
-- Returns a verdict; DECIDED where there is no open claim. Guard: fence; state claimed.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, field, state, reason, letter = unpack(ARGV, 5, 11)
local before, dispatch, retries = unpack(redis.call('HMGET', KEYS[8], 'state', 'dispatch', 'retries'))
if before ~= 'claimed' then return 'DECIDED' end
if letter ~= '' then redis.call('HSET', KEYS[11], key, letter) end
close(KEYS[8], KEYS[9], key)
settled(KEYS[10], field, state, dispatch, retries or 0, entry, nominal, reason)
return 'DONE'
