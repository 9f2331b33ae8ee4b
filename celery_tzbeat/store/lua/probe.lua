-- Run one captured queue command beside the epoch key: one slot, one server, and this user may write there.
-- KEYS[1] epoch   KEYS[2] the captured queue key
-- ARGV the command's words. Returns nothing. The queue key is gone after 10 s, read or not.
redis.call('EXISTS', KEYS[1])
redis.call(unpack(ARGV))
redis.call('PEXPIRE', KEYS[2], 10000)
return 'DONE'
