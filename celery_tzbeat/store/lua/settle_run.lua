-- Settle an open occurrence as it was found: lost, missed, dead by policy ... (state table lines 8, 14, 26).
-- KEYS[8] occurrence record   KEYS[9] open of the entry   KEYS[10] done hash   KEYS[11] dead
-- ARGV[5] key, entry, nominal, done field, new state, reason, dead letter (empty: none), state, dispatch and retries as found
-- Returns a verdict; DECIDED where state or order is another since. Guard: fence; state and order; nothing that runs.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, field, state, reason, letter, found, dispatch, retries = unpack(ARGV, 5, 14)
local at, at_dispatch, at_retries = unpack(redis.call('HMGET', KEYS[8], 'state', 'dispatch', 'retries'))
if at ~= found or at == 'running' or at_dispatch ~= dispatch or at_retries ~= retries then return 'DECIDED' end
if letter ~= '' then redis.call('HSET', KEYS[11], key, letter) end
close(KEYS[8], KEYS[9], key)
settled(KEYS[10], field, state, dispatch, retries, entry, nominal, reason)
return 'DONE'
