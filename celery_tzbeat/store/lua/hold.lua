-- Record occurrences that must not run beside another open one of their entry, by its overlap policy (lines 3, 4, 8).
-- KEYS[8...] per occurrence: occurrence record, open of the entry, done hash; then per other open one: record, done hash
-- ARGV[5] number of occurrences; then for each: key, entry, nominal, cursor, bucket number, done field, detail, policy,
--   start_within in ms, overlap, until in ms, sent at the latest after ms, number of others,
--   and for each other, as it was read: key, nominal, done field
-- Returns a verdict per occurrence: HELD; DONE where nothing holds it (send it; nothing is recorded); DECIDED.
-- Guard: fence; the nominal is neither ahead of the store's clock nor decided, or it waits. What is asked of the others is
-- conditional on their state now: who waits is coalesced; cancel_other: who runs is asked to stop, who does not is withdrawn.
local count = tonumber(ARGV[5])
local refusal = refused()
if refusal then return all(refusal, count) end

-- Returns by when at the latest a waiting one that was coalesced would have been sent, nil where none says so: who takes its
-- place waits no longer.
local function clear_away(others, of_entry, entry, nominal, overlap)
    local sent_by = nil
    for _, other in ipairs(others) do
        local state, dispatch, retries, before = unpack(redis.call('HMGET', other.record,
            'state', 'dispatch', 'retries', 'sent_by'))
        local settle_as = nil
        if state == 'waiting' then
            if tonumber(other.nominal) < tonumber(nominal) then settle_as = 'coalesced' end
        elseif overlap == 'cancel_other' and state == 'running' then
            if redis.call('HSETNX', other.record, 'cancel', 'overlap') == 1 then
                note('cancel', entry, other.nominal, other.nominal, 1, 'overlap')
            end
        elseif overlap == 'cancel_other' and state then
            settle_as = 'withdrawn'
        end
        if settle_as then
            if before then sent_by = math.min(sent_by or math.huge, tonumber(before)) end
            close(other.record, of_entry, other.key)
            settled(other.done, other.field, settle_as, dispatch, retries or 0, entry, other.nominal, 'overlap')
        end
    end
    return sent_by
end

local answers = {}
local at, others_at = 6, 8 + 3 * count
for i = 1, count do
    local record, of_entry, done = KEYS[5 + 3 * i], KEYS[6 + 3 * i], KEYS[7 + 3 * i]
    local key, entry, nominal, cursor, number, field, detail, policy, within, overlap, till, patience, size =
        unpack(ARGV, at, at + 12)
    at = at + 13
    local others = {}
    for n = 1, tonumber(size) do
        others[n] = { key = ARGV[at], nominal = ARGV[at + 1], field = ARGV[at + 2],
            record = KEYS[others_at], done = KEYS[others_at + 1] }
        at, others_at = at + 3, others_at + 2
    end
    local no, waits = refused_opening(record, done, entry, nominal, field, cursor)
    local sent_by = nil
    if not no and overlap ~= 'skip' and not (waits and not held(record, of_entry, key)) then
        sent_by = clear_away(others, of_entry, entry, nominal, overlap)
    end
    if no then
        answers[i] = no
    elseif not held(record, of_entry, key) then
        answers[i] = 'DONE'
    elseif overlap == 'skip' and not waits then
        redis.call('HSET', KEYS[3], entry, cursor)
        redis.call('HSET', last, entry, nominal .. '|skipped|' .. text(now))
        note('skipped', entry, nominal, nominal, 1, 'overlap')
        answers[i] = 'HELD'
    else
        if not waits then
            redis.call('HSET', record, 'state', 'waiting', 'entry', entry, 'nominal', nominal, 'epoch', ARGV[1],
                'dispatch', 1, 'retries', 0, 'payload', '', 'number', number, 'field', field, 'detail', detail,
                'policy', policy, 'within', within, 'eta', '', 'until', till)
            if patience ~= '' then
                redis.call('HSET', record, 'sent_by', text(math.min(sent_by or math.huge, now + tonumber(patience))))
            end
            redis.call('HSET', KEYS[3], entry, cursor)
            note('waiting', entry, nominal, nominal, 1, detail)
        end
        stand_open(of_entry, key, now) -- asked again, too: whoever waits longest hides nothing that is due behind it
        answers[i] = 'HELD'
    end
end
return answers
