-- A delivery asks to start (state table lines 12, 15, 16, 17, 27).
-- KEYS[5] occurrence record   KEYS[6] open of the entry   KEYS[7] done hash
-- ARGV[3...] the run (`worker_runs.lua`); ARGV[18] most deliveries, at most once 0/1, may be redispatched 0/1
-- Returns {'<gate> <starts> <state>', checkpoint where there is one}. Guard: the order and the state of the record, or the
-- done mark. Asked without the payload, which the ledger mostly has: UNKEPT, and nothing written, where it has none.
-- Repeated by the same token: WON, with the same numbers.
local run = run_at(3)
local most, once, redispatchable = tonumber(ARGV[18]), ARGV[19] == '1', ARGV[20] == '1'
local record, of_entry, done = KEYS[5], KEYS[6], KEYS[7]
local known = known_of(record)

local function answer(gate, starts, of) return { gate .. ' ' .. starts .. ' ' .. (of or '') } end

local function won(starts)
    local reply = answer('WON', starts, 'running')
    reply[2] = redis.call('HGET', record, 'checkpoint') or nil
    return reply
end

if known.state then
    local function so(gate) return answer(gate, known.starts, known.state) end
    if known.state == 'running' and known.token == run.token then return won(known.starts) end
    local order = compare(run.dispatch, run.retries, known.dispatch, known.retries)
    if order < 0 then return so('STALE') end
    if known.state == 'waiting' then return so('LIVE') end
    if known.state == 'running' then
        if order == 0 then -- it is acknowledged: should the start be given back, nobody has the message any more
            redis.call('HSET', record, 'copy', run.dispatch .. ' ' .. run.retries)
            return so('LIVE')
        end
        local next_dispatch, next_retries = order_in(known.noted)
        if not next_dispatch or compare(run.dispatch, run.retries, next_dispatch, next_retries) > 0 then
            redis.call('HSET', record, 'next', run.dispatch .. ' ' .. run.retries)
        end
        return so('SUCCESSOR')
    end
    if known.state == 'abandoned' and order == 0 and not redispatchable
            and redis.call('HGET', record, 'late') ~= UNRUN then
        return so('LIVE')
    end
    if once and known.starts > 0 then return so('SECOND_START') end
    if not retry_of(run, known.ran) and known.deliveries >= most then return so('EXHAUSTED') end
else
    local mark = redis.call('HGET', done, run.field)
    local settled_as = refused_by_mark(mark, run.dispatch)
    if settled_as then return answer('SETTLED', 0, settled_as) end
    if once and tonumber(run.retries) > 0 then return answer('SECOND_START', 0) end
    if once and not mark then return answer('UNKNOWN', 0) end
end
if run.payload == '' and redis.call('HSTRLEN', record, 'payload') == 0 then return answer('UNKEPT', 0) end
return won(begin(run, known, record, of_entry, 'started'))
