-- Set between a prelude and its script: how an occurrence is written down, closed and settled, by leaders and workers alike.
-- From the prelude: now, now_micros; the keys last, audit, open, live; audit_max, retention; author.
local function text(number) return string.format('%.0f', number) end

local function note(event, entry, first, last_one, count, detail)
    redis.call('XADD', audit, 'MAXLEN', '~', audit_max, '*', 'event', event, 'entry', entry, 'first', first,
        'last', last_one, 'count', count, 'epoch', author, 'detail', detail)
end

-- Stand in the ledger as unsettled; look_at is when the leader must act next, in milliseconds.
local function stand_open(of_entry, key, look_at)
    redis.call('ZADD', open, text(look_at), key)
    redis.call('SADD', of_entry, key)
end

-- Claims stand in `open` before everything else, in the order in which they were made: who made them owes them, and a next
-- leader takes them first. So they never hide what is due behind them.
local function claims_first(at) return at - 1e13 end

-- When a published message is late, so that the leader must look: start_within after it can be started.
local function late_after(eta, within)
    return math.max(now, tonumber(eta) or 0) + tonumber(within)
end

-- The letter of a settled state in its done mark: a small mark, since there is one for every occurrence of a day.
local letters = { done = 'd', sent = 's', dead = 'x', expired = 'e', revoked = 'r', withdrawn = 'w', lost = 'l',
    missed = 'm', coalesced = 'c', skipped = 'k' }

-- Settle an occurrence: done mark (state, dispatch, retries), last, audit (line 37 of the state table).
local function settled(done, field, state, dispatch, retries, entry, nominal, detail)
    redis.call('HSET', done, field, letters[state] .. ' ' .. dispatch .. ' ' .. retries)
    redis.call('PEXPIRE', done, retention)
    if entry ~= '' then redis.call('HSET', last, entry, nominal .. '|' .. state .. '|' .. text(now)) end
    note(state, entry, nominal, nominal, 1, detail)
end

-- Take an occurrence out of the unsettled ones, its payload with it.
local function close(record, of_entry, key)
    redis.call('DEL', record)
    redis.call('ZREM', open, key)
    redis.call('ZREM', live, key)
    redis.call('SREM', of_entry, key)
end

-- Take a run's token away without an end (lines 24, 25): its noted successor is next, or the run is abandoned.
-- Returns the new state. The token stays in the record: by it a late end is known.
local function free(record, key, entry, nominal, noted, within, why)
    redis.call('ZREM', live, key)
    if noted then
        local dispatch, retries = string.match(noted, '^(%d+) (%d+)$')
        redis.call('HSET', record, 'state', 'published', 'dispatch', dispatch, 'retries', retries)
        redis.call('HDEL', record, 'next')
        redis.call('ZADD', open, text(late_after('', within)), key)
        note('succeeded', entry, nominal, nominal, 1, why)
        return 'published'
    end
    redis.call('HSET', record, 'state', 'abandoned')
    redis.call('ZADD', open, text(now), key)
    note('abandoned', entry, nominal, nominal, 1, why)
    return 'abandoned'
end
