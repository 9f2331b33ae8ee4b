-- Write how a batch of runs, or of deliveries that never started, ended (state table lines 13, 20 to 24, 36, 38).
-- KEYS[5] dead   KEYS[6] wake (channel)   KEYS[7...] per end: occurrence record, open of the entry, done hash
-- ARGV[3] number of ends; then for each: key, entry, nominal or empty, epoch, done field, start_within in ms, dispatch,
--   retries, token (empty: it never started), state, detail, letter, eta in ms or empty
-- Returns an answer per end: DONE, DECIDED (written before, or nothing is left to write) or REFUSED.
-- Guard: token; where nobody runs: the order that was started last; where there is no record: the done mark. An end is
-- accepted when the lease has lapsed, or the run was redispatched, and nobody has started since.
local WORDS = 13
local goes_on = { retry = true, abandoned = true, given_back = true }
local unstarted = { expired = true, revoked = true }

-- nil where the end may be written over this record, or the answer that refuses it.
local function refused_end(item, known)
    if item.state == 'given_back' then
        if known.state == 'running' and known.token == item.token then return nil end
        return 'DECIDED'
    end
    local later = compare(known.dispatch, known.retries, item.dispatch, item.retries) > 0
    if item.token == '' then
        if known.state == 'running' or later then return 'REFUSED' end
        if unstarted[item.state] and known.state == 'abandoned' then return 'REFUSED' end
        return nil
    end
    if goes_on[item.state] and known.ended == item.token then return 'DECIDED' end
    if known.token ~= item.token then
        local dispatch, retries = order_in(known.ran)
        local started_later = dispatch and compare(dispatch, retries, item.dispatch, item.retries) > 0
        if known.state == 'running' or started_later then return 'REFUSED' end
    elseif known.state == 'running' then
        return nil
    end
    if goes_on[item.state] and (later or known.state == item.state) then return 'DECIDED' end
    return nil
end

-- Line 38: as it was before the start, which no body followed; the broker delivers the message again. Where a copy was
-- turned away meanwhile that was it: acknowledged, so the leader sends another one.
local function give_back(item, known, record)
    redis.call('HINCRBY', record, 'starts', -1)
    if not retry_of(item, known.before) then redis.call('HINCRBY', record, 'deliveries', -1) end
    redis.call('HSET', record, 'state', 'published', 'token', '', 'ran', known.before or '')
    note('given_back', item.entry, item.nominal, item.nominal, 1, item.detail)
    if known.copy == item.dispatch .. ' ' .. item.retries then
        redis.call('HSET', record, 'late', UNRUN)
        free(record, item.key, item.entry, item.nominal, known.noted, item.within, 'its message was acknowledged meanwhile')
        return
    end
    redis.call('ZREM', live, item.key)
    redis.call('ZADD', open, text(late_after('', item.within)), item.key)
end

-- Lines 21 and 24: the occurrence stays open.
local function go_on(item, known, record)
    redis.call('HSET', record, 'ended', item.token, 'ran', item.dispatch .. ' ' .. item.retries)
    if item.state == 'abandoned' then
        free(record, item.key, item.entry, item.nominal, known.noted, item.within, item.detail)
        return
    end
    local dispatch, retries, eta = item.dispatch, tonumber(item.retries) + 1, item.eta
    local noted_dispatch, noted_retries = order_in(known.noted)
    if noted_dispatch and compare(noted_dispatch, noted_retries, dispatch, retries) > 0 then
        dispatch, retries, eta = noted_dispatch, noted_retries, ''
    end
    redis.call('HSET', record, 'state', 'published', 'dispatch', dispatch, 'retries', retries, 'eta', eta)
    redis.call('HDEL', record, 'next')
    redis.call('ZREM', live, item.key)
    redis.call('ZADD', open, text(late_after(eta, item.within)), item.key)
    note('retry', item.entry, item.nominal, item.nominal, 1, item.detail)
end

local answers, wakes = {}, false
for i = 1, tonumber(ARGV[3]) do
    local record, of_entry, done = KEYS[4 + 3 * i], KEYS[5 + 3 * i], KEYS[6 + 3 * i]
    local item, known = {}, {}
    item.key, item.entry, item.nominal, item.epoch, item.field, item.within, item.dispatch, item.retries, item.token,
        item.state, item.detail, item.letter, item.eta = unpack(ARGV, 4 + (i - 1) * WORDS, 3 + i * WORDS)
    known.state, known.dispatch, known.retries, known.token, known.ran, known.ended, known.noted, known.before, known.copy =
        unpack(redis.call('HMGET', record, 'state', 'dispatch', 'retries', 'token', 'ran', 'ended', 'next', 'before',
            'copy'))
    known.retries = known.retries or '0'
    author = item.epoch
    local no
    if known.state then
        no = refused_end(item, known)
    elseif goes_on[item.state] or refused_by_mark(redis.call('HGET', done, item.field), item.dispatch) then
        no = 'DECIDED'
    end
    if no then
        answers[i] = no
    elseif goes_on[item.state] then
        if item.state == 'given_back' then give_back(item, known, record) else go_on(item, known, record) end
        wakes = wakes or item.state ~= 'retry'
        answers[i] = 'DONE'
    else
        local dispatch, retries = item.dispatch, item.retries
        if known.state and compare(known.dispatch, known.retries, dispatch, retries) > 0 then
            dispatch, retries = known.dispatch, known.retries
        end
        if item.letter ~= '' then redis.call('HSET', KEYS[5], item.key, item.letter) end
        close(record, of_entry, item.key)
        settled(done, item.field, item.state, dispatch, retries, item.entry, item.nominal, item.detail)
        wakes = true
        answers[i] = 'DONE'
    end
end
-- Without effect on the ledger: a user who may not publish has settled all the same.
if wakes then redis.pcall('PUBLISH', KEYS[6], 'settled') end
return answers
