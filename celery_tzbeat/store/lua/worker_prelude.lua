-- Set before every script of a worker; `ledger.lua` stands between. A worker has no epoch: its scripts are conditional on a
-- run's token and on a delivery's order. Its head:
-- KEYS[1] last   KEYS[2] audit   KEYS[3] open   KEYS[4] live
-- ARGV[1] audit records to keep   ARGV[2] retention, ms
local time = redis.call('TIME')
local now_micros = time[1] * 1000000 + time[2]
local now = math.floor(now_micros / 1000)
local last, audit, open, live = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local audit_max, retention = ARGV[1], ARGV[2]
local author = '0' -- the epoch in audit records: each delivery names its own

-- Compare two orders: below 0 where the first is lower, 0 where they are equal.
local function compare(dispatch, retries, other_dispatch, other_retries)
    local first = tonumber(dispatch) - tonumber(other_dispatch)
    if first ~= 0 then return first end
    return tonumber(retries) - tonumber(other_retries)
end

-- An order as records keep it in one text: dispatch and retries.
local function order_in(text_of_order)
    return string.match(text_of_order or '', '^(%d+) (%d+)$')
end

-- Whether a start of this order is Celery's own retry of the one that was started last (`ran`), which is no further delivery.
local function retry_of(run, ran)
    local dispatch, retries = order_in(ran)
    return dispatch == run.dispatch and tonumber(run.retries) > tonumber(retries)
end

-- In place of 0 or 1 in `late` (whether the task acknowledges late): no body began, and the message is gone (line 38).
local UNRUN = '2'

-- The state whose done mark refuses this order (line 15, 17), nil where it may run.
local refusing = { d = 'done', x = 'dead', e = 'expired', r = 'revoked', w = 'withdrawn', m = 'missed', c = 'coalesced',
    k = 'skipped' }
local function refused_by_mark(mark, dispatch)
    local letter, marked = string.match(mark or '', '^(%a) (%d+)')
    if letter == 'x' and tonumber(dispatch) > tonumber(marked) then return nil end
    return letter and refusing[letter]
end

