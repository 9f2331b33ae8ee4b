-- Move an abandoned occurrence to claimed under the next dispatch, which its patched payload names (state table line 26).
-- KEYS[8] occurrence record
-- ARGV[5] key, entry, nominal, the dispatch that was abandoned, payload
-- Returns a verdict; DECIDED where it is not abandoned under that dispatch any more. Guard: fence; state and dispatch.
-- `retries` starts anew: whatever the message carries, its order is not lower than the record's.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, before, payload = unpack(ARGV, 5, 9)
local state, dispatch = unpack(redis.call('HMGET', KEYS[8], 'state', 'dispatch'))
if state ~= 'abandoned' or dispatch ~= before then return 'DECIDED' end
redis.call('HSET', KEYS[8], 'state', 'claimed', 'dispatch', tonumber(before) + 1, 'retries', 0, 'epoch', ARGV[1],
    'payload', payload, 'eta', '')
redis.call('ZADD', open, text(claims_first(now)), key)
note('redispatched', entry, nominal, nominal, 1, tonumber(before) + 1)
return 'DONE'
