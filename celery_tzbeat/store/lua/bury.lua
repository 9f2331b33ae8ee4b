-- Settle an occurrence that cannot be sent as dead, with a dead letter (state table line 5).
-- KEYS[8] done hash   KEYS[9] dead
-- ARGV[5] key, entry, nominal, done field, cursor, reason, letter
-- Returns a verdict. Guard: fence; the nominal is neither ahead of the store's clock nor decided.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, field, cursor, reason, letter = unpack(ARGV, 5, 11)
if early(nominal) then return 'EARLY' end
if decided(entry, nominal) then return 'DECIDED' end
redis.call('HSET', KEYS[9], key, letter)
redis.call('HSET', KEYS[3], entry, cursor)
settled(KEYS[8], field, 'dead', 1, 0, entry, nominal, reason)
return 'DONE'
