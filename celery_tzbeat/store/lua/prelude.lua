-- Set before every script of a leader; `ledger.lua` stands between. Its head:
-- KEYS[1] epoch   KEYS[2] schema   KEYS[3] cursor   KEYS[4] last   KEYS[5] audit   KEYS[6] open   KEYS[7] live
-- ARGV[1] epoch of the caller   ARGV[2] max skew, microseconds   ARGV[3] audit records to keep   ARGV[4] retention, ms
local time = redis.call('TIME')
local now_micros = time[1] * 1000000 + time[2]
local now = math.floor(now_micros / 1000)
local epoch = tonumber(ARGV[1])
local fence = tonumber(redis.call('GET', KEYS[1]) or '0')
local last, audit, open, live = KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local audit_max, retention = ARGV[3], ARGV[4]
local author = ARGV[1] -- the epoch in audit records

-- The fence: a later leader has taken office, or the store has lost its data since this one did.
local function refused()
    if fence > epoch then return 'STALE' end
    if redis.call('EXISTS', KEYS[2]) == 0 then return 'WIPED' end
    return nil
end

local function all(answer, count)
    local answers = {}
    for i = 1, count do answers[i] = answer end
    return answers
end

-- The nominal that the entry's cursor stands at, nil where there is none.
local function cursor_of(entry)
    local text = redis.call('HGET', KEYS[3], entry)
    if not text then return nil end
    return tonumber(string.match(text, '^%-?%d+'))
end

local function decided(entry, nominal)
    local at = cursor_of(entry)
    return at ~= nil and at >= tonumber(nominal)
end

local function early(nominal)
    return tonumber(nominal) > now_micros + tonumber(ARGV[2])
end

-- Whether an open occurrence of the entry, other than this one, keeps it from being sent (overlap). With cancel_other the one
-- that waits is sent at the latest `sent_by`.
local function held(record, of_entry, key)
    if redis.call('SCARD', of_entry) <= redis.call('SISMEMBER', of_entry, key) then return false end
    local sent_by = redis.call('HGET', record, 'sent_by')
    return not sent_by or now < tonumber(sent_by)
end

-- Why an occurrence may not be opened (lines 1, 2, 3, 7): a verdict, nil where it may; and whether it waits. One that waits
-- has moved its cursor already.
local function refused_opening(record, done, entry, nominal, field, cursor)
    if early(nominal) then return 'EARLY' end
    local state = redis.call('HGET', record, 'state')
    if state == 'waiting' then return nil, true end
    if decided(entry, nominal) then return 'DECIDED' end
    if state or redis.call('HEXISTS', done, field) == 1 then
        redis.call('HSET', KEYS[3], entry, cursor)
        return 'DECIDED'
    end
    return nil, false
end

-- Take a request off, and keep what became of it. Returns whether it was there.
local function answered(requests, outcome, id, words, keep)
    if redis.call('XDEL', requests, id) == 0 then return false end
    redis.call('SET', outcome, words, 'PX', keep)
    return true
end

