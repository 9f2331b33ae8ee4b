-- Run one captured queue command beside the epoch key: one slot, one server, and this user may write there.
-- KEYS[1] epoch   KEYS[2] the captured queue key   KEYS[3...] queue keys that are not touched: may this user name them?
-- ARGV the command's words. Returns DONE. The queue key is gone after 10 s, read or not.
redis.call('EXISTS', KEYS[1])
-- Without effect, but an error for a user who may not: then nothing is pushed that could not be taken away.
redis.call('PEXPIRE', KEYS[2], 10000)
redis.call(unpack(ARGV))
redis.call('PEXPIRE', KEYS[2], 10000)
return 'DONE'
