-- Withdraw an open occurrence, or ask its run to stop: the next heartbeat tells it (state table lines 29, 30).
-- KEYS[8] occurrence record   KEYS[9] open of the entry   KEYS[10] done hash   KEYS[11] requests
-- KEYS[12] outcome of the request
-- ARGV[5] key, entry, nominal, done field, request, by, why, outcome kept for ms
-- Returns {'DONE', what was done: withdrawn or asked to stop} or {verdict}; DECIDED where nothing is open. Guard: fence.
local refusal = refused()
if refusal then return { refusal } end
local key, entry, nominal, field, request, by, why, keep = unpack(ARGV, 5, 12)
local state, dispatch, retries = unpack(redis.call('HMGET', KEYS[8], 'state', 'dispatch', 'retries'))
if not state then return { 'DECIDED' } end
local words = 'asked to stop'
if state == 'running' then
    redis.call('HSET', KEYS[8], 'cancel', by)
    note('cancel', entry, nominal, nominal, 1, why)
else
    words = 'withdrawn'
    close(KEYS[8], KEYS[9], key)
    settled(KEYS[10], field, 'withdrawn', dispatch, retries or 0, entry, nominal, why)
end
answered(KEYS[11], KEYS[12], request, words, keep)
return { 'DONE', words }
