-- Keep that an entry is not walked (state table line 31).
-- KEYS[8] paused   KEYS[9] requests   KEYS[10] outcome of the request
-- ARGV[5] entry, pause (JSON), detail, request or empty, outcome kept for ms
-- Returns a verdict; DECIDED where the request was carried out before. Guard: fence, the request.
local refusal = refused()
if refusal then return refusal end
local entry, pause, detail, request, keep = unpack(ARGV, 5, 9)
if request ~= '' and not answered(KEYS[9], KEYS[10], request, 'paused', keep) then return 'DECIDED' end
redis.call('HSET', KEYS[8], entry, pause)
note('paused', entry, '', '', 0, detail)
return 'DONE'
