-- Drop a dead letter; its done mark stays (state table line 28).
-- KEYS[8] dead   KEYS[9] requests   KEYS[10] outcome of the request
-- ARGV[5] key, entry, nominal or empty, request, by and why, outcome kept for ms
-- Returns a verdict; DECIDED where there is no letter. Guard: fence.
local refusal = refused()
if refusal then return refusal end
local key, entry, nominal, request, why, keep = unpack(ARGV, 5, 10)
if redis.call('HDEL', KEYS[8], key) == 0 then return 'DECIDED' end
answered(KEYS[9], KEYS[10], request, 'discarded', keep)
note('discarded', entry, nominal, nominal, 1, why)
return 'DONE'
