-- A delivery asks to start (state table lines 12, 15, 16, 17, 27).
-- KEYS[5] occurrence record   KEYS[6] open of the entry   KEYS[7] done hash
-- ARGV[3...] the run (`worker_runs.lua`); ARGV[18] most deliveries, at most once 0/1, may be redispatched 0/1
-- Returns {gate, starts, state, checkpoint}. Guard: the order and the state of the record, or the done mark.
-- Repeated by the same token: WON, with the same numbers.
local run = run_at(3)
local most, once, redispatchable = tonumber(ARGV[18]), ARGV[19] == '1', ARGV[20] == '1'
local record, of_entry, done = KEYS[5], KEYS[6], KEYS[7]
local state, dispatch, retries, token, starts, deliveries, ran, noted, checkpoint = unpack(redis.call('HMGET', record,
    'state', 'dispatch', 'retries', 'token', 'starts', 'deliveries', 'ran', 'next', 'checkpoint'))
starts = tonumber(starts) or 0

local function answer(gate, number, of)
    return { gate, number, of or '', checkpoint or '' }
end

if state then
    if state == 'running' and token == run.token then return answer('WON', starts, state) end
    local order = compare(run.dispatch, run.retries, dispatch, retries or 0)
    if order < 0 then return answer('STALE', starts, state) end
    if state == 'waiting' then return answer('LIVE', starts, state) end
    if state == 'running' then
        if order == 0 then return answer('LIVE', starts, state) end
        local next_dispatch, next_retries = order_in(noted)
        if not next_dispatch or compare(run.dispatch, run.retries, next_dispatch, next_retries) > 0 then
            redis.call('HSET', record, 'next', run.dispatch .. ' ' .. run.retries)
        end
        return answer('SUCCESSOR', starts, state)
    end
    if state == 'abandoned' and order == 0 and not redispatchable then return answer('LIVE', starts, state) end
    if once and starts > 0 then return answer('SECOND_START', starts, state) end
    if not retry_of(run, ran) and (tonumber(deliveries) or 0) >= most then
        return answer('EXHAUSTED', starts, state)
    end
else
    local mark = redis.call('HGET', done, run.field)
    local settled_as = refused_by_mark(mark, run.dispatch)
    if settled_as then return answer('SETTLED', 0, settled_as) end
    if once and tonumber(run.retries) > 0 then return answer('SECOND_START', 0) end
    if once and not mark then return answer('UNKNOWN', 0) end
end
return answer('WON', begin(run, record, of_entry, 'started'), 'running')
