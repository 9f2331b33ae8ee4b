-- Set behind `ledger.lua` before the scripts that may begin a run: start and heartbeat.
local RUN_WORDS = 15

-- A run as a worker names it, from ARGV[at] on: key, entry, nominal (empty: an ordinary message), epoch, bucket number, done
-- field, policy, start_within in ms, run lease in ms, dispatch, retries, token, worker, acks_late 0/1, payload.
local function run_at(at)
    local run = {}
    run.key, run.entry, run.nominal, run.epoch, run.number, run.field, run.policy, run.within, run.lease,
        run.dispatch, run.retries, run.token, run.worker, run.late, run.payload = unpack(ARGV, at, at + RUN_WORDS - 1)
    author = run.epoch
    return run
end

-- What the record says; `state` is false where there is none.
local function known_of(record)
    local known = {}
    known.state, known.dispatch, known.retries, known.token, known.starts, known.deliveries, known.ran, known.noted,
        known.policy, known.cancel, known.overlap = unpack(redis.call('HMGET', record, 'state', 'dispatch', 'retries',
            'token', 'starts', 'deliveries', 'ran', 'next', 'policy', 'cancel', 'overlap'))
    known.retries = known.retries or '0'
    known.starts = tonumber(known.starts) or 0
    known.deliveries = tonumber(known.deliveries) or 0
    return known
end

local function keep_lease(run)
    local deadline = text(now + tonumber(run.lease))
    redis.call('ZADD', live, deadline, run.key)
    redis.call('ZADD', open, deadline, run.key)
end

-- Become the running one (lines 12, 17, 18, 19, 27); a record that is gone is written anew. Returns the starts of the key.
local function begin(run, known, record, of_entry, why)
    if not known.policy then
        redis.call('HSET', record, 'entry', run.entry, 'nominal', run.nominal, 'epoch', run.epoch,
            'number', run.number, 'field', run.field, 'policy', run.policy, 'within', run.within, 'eta', '')
        redis.call('HSETNX', record, 'detail', '')
        redis.call('HSETNX', record, 'payload', '')
    end
    local starts = known.starts + 1
    local deliveries = known.deliveries + (retry_of(run, known.ran) and 0 or 1)
    redis.call('HSET', record, 'state', 'running', 'dispatch', run.dispatch, 'retries', run.retries,
        'before', known.ran or '', 'ran', run.dispatch .. ' ' .. run.retries, 'token', run.token, 'worker', run.worker,
        'late', run.late, 'started', text(now_micros), 'starts', starts, 'deliveries', deliveries)
    if run.payload ~= '' then redis.call('HSET', record, 'payload', run.payload) end
    local dispatch, retries = order_in(known.noted)
    if dispatch and compare(dispatch, retries, run.dispatch, run.retries) <= 0 then
        redis.call('HDEL', record, 'next')
    end
    keep_lease(run)
    redis.call('SADD', of_entry, run.key)
    note(why, run.entry, run.nominal, run.nominal, 1, run.worker)
    return starts
end

