-- Record the right to publish one occurrence over a broker that is not the store (state table line 2); the cursor moves.
-- KEYS[6] occurrence record   KEYS[7] open   KEYS[8] open of the entry   KEYS[9] done hash
-- ARGV[5] key, entry, nominal, cursor, payload, done field
-- Returns a verdict. Guard: fence; the nominal is neither ahead of the store's clock nor decided.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, cursor, payload, field = unpack(ARGV, 5, 10)
if early(nominal) then return 'EARLY' end
if decided(entry, nominal) then return 'DECIDED' end
if redis.call('EXISTS', KEYS[6]) == 1 or redis.call('HEXISTS', KEYS[9], field) == 1 then return 'DECIDED' end
redis.call('HSET', KEYS[6], 'state', 'claimed', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
    'dispatch', 1, 'payload', payload)
redis.call('ZADD', KEYS[7], now_millis, key)
redis.call('SADD', KEYS[8], key)
redis.call('HSET', KEYS[3], entry, cursor)
note('claimed', entry, nominal, nominal, 1, '')
return 'DONE'
