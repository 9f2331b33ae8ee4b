-- Write that a run whose lease has lapsed is abandoned; where a successor stands by, it is published instead (line 25).
-- KEYS[8] occurrence record
-- ARGV[5] key, entry, nominal, token
-- Returns {'DONE', new state} or {verdict}; DECIDED where the token has beaten, ended or gone. Guard: fence; token; deadline.
local refusal = refused()
if refusal then return { refusal } end
local key, entry, nominal, token = unpack(ARGV, 5, 8)
local state, holder, noted, within = unpack(redis.call('HMGET', KEYS[8], 'state', 'token', 'next', 'within'))
if state ~= 'running' or holder ~= token then return { 'DECIDED' } end
local deadline = redis.call('ZSCORE', live, key) or redis.call('ZSCORE', open, key)
if deadline and tonumber(deadline) > now then return { 'DECIDED' } end
return { 'DONE', free(KEYS[8], key, entry, nominal, noted, within, 'the run lease lapsed') }
