-- Take a request off with an outcome in words: refused, expired, nothing there.
-- KEYS[8] requests   KEYS[9] outcome of the request
-- ARGV[5] request, words, outcome kept for ms
-- Returns a verdict; DECIDED where it was answered before. Guard: fence.
local refusal = refused()
if refusal then return refusal end
local id, words, keep = unpack(ARGV, 5, 7)
if not answered(KEYS[8], KEYS[9], id, words, keep) then return 'DECIDED' end
note('answered', '', '', '', 0, words)
return 'DONE'
