-- Renew the leases of a batch of runs; register what started while the store was down (state table lines 18, 19).
-- KEYS[5...] per run: occurrence record, open of the entry, done hash
-- ARGV[3] number of runs; then for each: the run (`worker_runs.lua`)
-- Returns a pulse per run. Guard: token; where it is not the record's: order, state, done mark.
local answers = {}
for i = 1, tonumber(ARGV[3]) do
    local record, of_entry, done = KEYS[2 + 3 * i], KEYS[3 + 3 * i], KEYS[4 + 3 * i]
    local run = run_at(4 + (i - 1) * RUN_WORDS)
    local known = known_of(record)
    if known.state == 'running' and known.token == run.token then
        keep_lease(run)
        answers[i] = known.cancel and 'CANCEL' or 'ALIVE'
    elseif not known.state and refused_by_mark(redis.call('HGET', done, run.field), run.dispatch) then
        answers[i] = 'LOST'
    elseif known.state and (known.token == run.token
            or compare(known.dispatch, known.retries, run.dispatch, run.retries) > 0) then
        answers[i] = 'LOST'
    elseif known.state == 'running' then
        if known.overlap ~= run.token then
            redis.call('HSET', record, 'overlap', run.token)
            note('overlap', run.entry, run.nominal, run.nominal, 1, run.worker)
        end
        answers[i] = 'OVERLAP'
    else
        begin(run, known, record, of_entry, 'resumed')
        answers[i] = 'RESUMED'
    end
end
return answers
