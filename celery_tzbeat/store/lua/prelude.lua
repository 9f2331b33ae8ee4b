-- Set before every script of a leader. Its head:
-- KEYS[1] epoch   KEYS[2] schema   KEYS[3] cursor   KEYS[4] last   KEYS[5] audit
-- ARGV[1] epoch of the caller   ARGV[2] max skew, microseconds   ARGV[3] audit records to keep   ARGV[4] retention, ms
local time = redis.call('TIME')
local now_micros = time[1] * 1000000 + time[2]
local now_millis = string.format('%.0f', math.floor(now_micros / 1000))
local epoch = tonumber(ARGV[1])
local fence = tonumber(redis.call('GET', KEYS[1]) or '0')

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

local function note(event, entry, first, last, count, detail)
    redis.call('XADD', KEYS[5], 'MAXLEN', '~', ARGV[3], '*', 'event', event, 'entry', entry, 'first', first,
        'last', last, 'count', count, 'epoch', ARGV[1], 'detail', detail)
end

-- The letter of a settled state in its done mark: a small mark, since there is one for every occurrence of a day.
local letters = { sent = 's', dead = 'x', withdrawn = 'w', lost = 'l', missed = 'm', coalesced = 'c', skipped = 'k' }

-- Settle an occurrence: done mark (state, dispatch, retries), last, audit (line 37 of the state table).
local function settled(done, field, state, dispatch, entry, nominal, detail)
    redis.call('HSET', done, field, letters[state] .. ' ' .. dispatch .. ' 0')
    redis.call('PEXPIRE', done, ARGV[4])
    redis.call('HSET', KEYS[4], entry, nominal .. '|' .. state .. '|' .. now_millis)
    note(state, entry, nominal, nominal, 1, detail)
end
