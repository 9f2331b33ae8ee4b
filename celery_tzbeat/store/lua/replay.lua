-- Move a dead occurrence to claimed under a higher dispatch; its letter and the request go with it (state table line 28).
-- KEYS[8] occurrence record   KEYS[9] open of the entry   KEYS[10] done hash   KEYS[11] dead   KEYS[12] requests
-- KEYS[13] outcome of the request
-- ARGV[5] key, entry, nominal, bucket number, done field, dispatch, payload, policy, start_within in ms, request,
--   by and why, outcome kept for ms
-- Returns {'DONE'} or {verdict, the least dispatch}; DECIDED where there is no letter, or the done mark admits no replay, or
-- only a higher dispatch. Guard: fence; letter, no record, mark.
local refusal = refused()
if refusal then return { refusal } end
local key, entry, nominal, number, field, dispatch, payload, policy, within, request, why, keep = unpack(ARGV, 5, 16)
if redis.call('HEXISTS', KEYS[11], key) == 0 or redis.call('EXISTS', KEYS[8]) == 1 then return { 'DECIDED' } end
local mark, before = string.match(redis.call('HGET', KEYS[10], field) or '', '^(%a) (%d+)')
if mark and not string.find('xsl', mark) then return { 'DECIDED' } end -- the letter is older than an end that counts
if before and tonumber(before) >= tonumber(dispatch) then return { 'DECIDED', tostring(tonumber(before) + 1) } end
redis.call('HSET', KEYS[8], 'state', 'claimed', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
    'dispatch', dispatch, 'retries', 0, 'payload', payload, 'number', number, 'field', field, 'detail', 'replay',
    'policy', policy, 'within', within, 'eta', '')
stand_open(KEYS[9], key, claims_first(now))
redis.call('HDEL', KEYS[11], key)
answered(KEYS[12], KEYS[13], request, 'replayed as dispatch ' .. dispatch, keep)
note('replayed', entry, nominal, nominal, 1, why)
return { 'DONE' }
