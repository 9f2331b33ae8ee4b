-- Forget that an entry is paused (state table line 31).
-- KEYS[8] paused   KEYS[9] requests   KEYS[10] outcome of the request
-- ARGV[5] entry, detail, request or empty, outcome kept for ms
-- Returns a verdict; DECIDED where it is not paused: the request stands. Guard: fence, the pause.
local refusal = refused()
if refusal then return refusal end
local entry, detail, request, keep = unpack(ARGV, 5, 8)
if redis.call('HDEL', KEYS[8], entry) == 0 then return 'DECIDED' end
if request ~= '' then answered(KEYS[9], KEYS[10], request, 'unpaused', keep) end
note('unpaused', entry, '', '', 0, detail)
return 'DONE'
