-- The atomic steps of tokenmq. Sections begin with "--- name"; the prelude stands before each.
--
-- Rules of the house:
--   every key comes in KEYS, and all of them carry one hash tag;
--   types are checked, read-only, before the first write, because Lua does not roll back;
--   XACK and XDEL come before any XADD, so that draining works when Redis is at maxmemory;
--   whoever ends a delivery first takes the 1 that XACK answers exactly once (the fence);
--   a repeated call changes nothing: it answers SUPERSEDED, which is a fine answer.
--
-- The backlog hash holds, per partition, "<p>" = XLEN of its stream and "<p>:t" = its prompt tokens,
-- and the totals "tasks" and "bytes". A field that reaches zero is removed.

--- prelude
local SUPERSEDED, DONE, OTHER, VANISHED = 0, 1, 2, 3

local function wrong_type(key, kind)
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then
    return redis.error_reply('WRONGTYPE ' .. key .. ' is a ' .. found .. ', not a ' .. kind)
  end
end

local function bump(backlog, field, by)
  if by ~= 0 and redis.call('HINCRBY', backlog, field, by) == 0 then
    redis.call('HDEL', backlog, field)
  end
end

local function moved(backlog, partition, tasks, tokens, bytes)
  bump(backlog, partition, tasks)
  bump(backlog, partition .. ':t', tokens)
  bump(backlog, 'tasks', tasks)
  bump(backlog, 'bytes', bytes)
end

local function ensure_group(stream, group)
  if redis.call('EXISTS', stream) == 0 then
    redis.call('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  end
end

local function slice(first, count)
  local part = {}
  for i = 1, count do part[i] = ARGV[first + i - 1] end
  return part
end

--- submit
-- KEYS job backlog jobs stream…   ARGV group name cursor_expected cursor_new tasks_max bytes_max
-- tasks bytes, then per stream: partition count tokens bytes, then count × (m h)
-- -> {DONE} | {SUPERSEDED} when cursor_new is already there | {OTHER, cursor} | {VANISHED} overloaded
--    | {-1} when the job was cancelled
local wrong = wrong_type(KEYS[1], 'hash') or wrong_type(KEYS[2], 'hash') or wrong_type(KEYS[3], 'set')
if wrong then return wrong end
for i = 4, #KEYS do
  wrong = wrong_type(KEYS[i], 'stream')
  if wrong then return wrong end
end
local cursor = redis.call('HGET', KEYS[1], 'cursor') or ''
if ARGV[4] ~= '' then
  if cursor == ARGV[4] then return {SUPERSEDED} end
  if cursor ~= ARGV[3] then return {OTHER, cursor} end
end
if redis.call('HGET', KEYS[1], 'state') == 'cancelled' then return {-1} end
local waiting = tonumber(redis.call('HGET', KEYS[2], 'tasks') or '0')
local held = tonumber(redis.call('HGET', KEYS[2], 'bytes') or '0')
if waiting + tonumber(ARGV[7]) > tonumber(ARGV[5]) or held + tonumber(ARGV[8]) > tonumber(ARGV[6]) then
  return {VANISHED, waiting, held}
end
local at = 9
for i = 4, #KEYS do
  local count = tonumber(ARGV[at + 1])
  ensure_group(KEYS[i], ARGV[1])
  for e = 0, count - 1 do
    redis.call('XADD', KEYS[i], '*', 'm', ARGV[at + 4 + 2 * e], 'h', ARGV[at + 5 + 2 * e])
  end
  moved(KEYS[2], ARGV[at], count, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]))
  at = at + 4 + 2 * count
end
redis.call('HINCRBY', KEYS[1], 'submitted', ARGV[7])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'cursor', ARGV[4]) end
redis.call('SADD', KEYS[3], ARGV[2])
return {DONE}

--- route
-- KEYS ingress backlog seen dead jobs, job × J, stream × S
-- ARGV routers engines seen_max seen_ttl_ms dead_max J S, name × J, partition × S,
--      then per entry: id job_index stream_index tokens bytes task_id m h
-- -> per entry DONE | SUPERSEDED | OTHER when the id came before (then a dead letter)
local J, S = tonumber(ARGV[6]), tonumber(ARGV[7])
local wrong = wrong_type(KEYS[1], 'stream') or wrong_type(KEYS[2], 'hash')
  or wrong_type(KEYS[3], 'zset') or wrong_type(KEYS[4], 'stream') or wrong_type(KEYS[5], 'set')
if wrong then return wrong end
for i = 6, #KEYS do
  wrong = wrong_type(KEYS[i], i <= 5 + J and 'hash' or 'stream')
  if wrong then return wrong end
end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local seen_max = tonumber(ARGV[3])
local answers = {}
for at = 8 + J + S, #ARGV, 8 do
  local id, job, stream = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local name, partition = ARGV[7 + job], ARGV[7 + J + stream]
  local answer = SUPERSEDED
  if redis.call('XACK', KEYS[1], ARGV[1], id) == 1 then
    redis.call('XDEL', KEYS[1], id)
    local member = name .. '\0' .. ARGV[at + 5]
    if seen_max > 0 and redis.call('ZADD', KEYS[3], 'NX', now, member) == 0 then
      redis.call('XADD', KEYS[4], 'MAXLEN', ARGV[5], '*', 'm', ARGV[at + 6], 'job', name,
        'id', ARGV[at + 5], 'code', 'duplicate_id', 'reason', 'id: came before in this job')
      answer = OTHER
    else
      ensure_group(KEYS[5 + J + stream], ARGV[2])
      redis.call('XADD', KEYS[5 + J + stream], '*', 'm', ARGV[at + 6], 'h', ARGV[at + 7])
      moved(KEYS[2], partition, 1, tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]))
      redis.call('HINCRBY', KEYS[5 + job], 'submitted', 1)
      redis.call('SADD', KEYS[5], name)
      answer = DONE
    end
  end
  answers[#answers + 1] = answer
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now - tonumber(ARGV[4]))
redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -seen_max - 1)
return answers

--- settle
-- KEYS backlog, then per group: stream results job
-- ARGV group, then per group: partition count, then count × (id status tokens bytes prompt_tokens
--      cached_tokens output_tokens prompt_bytes n field × n)
-- -> {answers, most}: per entry DONE | SUPERSEDED | VANISHED (the stream itself is gone);
--    most is the length of the longest results stream touched
local wrong = wrong_type(KEYS[1], 'hash')
if wrong then return wrong end
for i = 2, #KEYS, 3 do
  wrong = wrong_type(KEYS[i], 'stream') or wrong_type(KEYS[i + 1], 'stream')
    or wrong_type(KEYS[i + 2], 'hash')
  if wrong then return wrong end
end
local answers, most, at = {}, 0, 2
for i = 2, #KEYS, 3 do
  local stream, results, job = KEYS[i], KEYS[i + 1], KEYS[i + 2]
  local partition, count = ARGV[at], tonumber(ARGV[at + 1])
  local gone = redis.call('EXISTS', stream) == 0
  local status = {ok = 0, error = 0, cancelled = 0}
  local done, tokens, bytes, prompt, cached, output, calibrating = 0, 0, 0, 0, 0, 0, 0
  at = at + 2
  for _ = 1, count do
    local n = tonumber(ARGV[at + 8])
    local answer = gone and VANISHED or SUPERSEDED
    if redis.call('XACK', stream, ARGV[1], ARGV[at]) == 1 then
      redis.call('XDEL', stream, ARGV[at])
      redis.call('XADD', results, '*', unpack(slice(at + 9, n)))
      done = done + 1
      status[ARGV[at + 1]] = status[ARGV[at + 1]] + 1
      tokens = tokens + tonumber(ARGV[at + 2])
      bytes = bytes + tonumber(ARGV[at + 3])
      prompt = prompt + tonumber(ARGV[at + 4])
      cached = cached + tonumber(ARGV[at + 5])
      output = output + tonumber(ARGV[at + 6])
      calibrating = calibrating + tonumber(ARGV[at + 7])
      answer = DONE
    end
    answers[#answers + 1] = answer
    at = at + 9 + n
  end
  if done > 0 then
    moved(KEYS[1], partition, -done, -tokens, -bytes)
    for name, by in pairs(status) do
      if by > 0 then redis.call('HINCRBY', job, name, by) end
    end
    redis.call('HINCRBY', job, 'prompt_tokens', prompt)
    redis.call('HINCRBY', job, 'cached_tokens', cached)
    redis.call('HINCRBY', job, 'output_tokens', output)
    -- Tokens per byte forgets: once 4 MiB were seen both sums are halved (an EMA over bytes).
    if calibrating > 0 then
      redis.call('HINCRBY', job, 'calibration_tokens', prompt)
      if redis.call('HINCRBY', job, 'calibration_bytes', calibrating) > 4194304 then
        for _, name in ipairs({'calibration_tokens', 'calibration_bytes'}) do
          redis.call('HSET', job, name, math.floor(redis.call('HGET', job, name) / 2))
        end
      end
    end
  end
  local length = redis.call('XLEN', results)
  if length > most then most = length end
end
return {answers, most}

--- requeue
-- Retry, give back, or recover: the delivery ends and the task waits again, with a new header.
-- KEYS stream backlog delayed   ARGV group partition, then per entry: id tokens bytes delay_ms h
-- -> per entry DONE | SUPERSEDED | VANISHED when it was pending but its fields are gone
local wrong = wrong_type(KEYS[1], 'stream') or wrong_type(KEYS[2], 'hash') or wrong_type(KEYS[3], 'zset')
if wrong then return wrong end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local answers = {}
for at = 3, #ARGV, 5 do
  local id, delay = ARGV[at], tonumber(ARGV[at + 3])
  local found = redis.call('XRANGE', KEYS[1], id, id)[1]
  local answer = SUPERSEDED
  if redis.call('XACK', KEYS[1], ARGV[1], id) == 1 then
    answer = VANISHED
    local task
    if found then
      for f = 1, #found[2], 2 do
        if found[2][f] == 'm' then task = found[2][f + 1] end
      end
    end
    if task then
      redis.call('XDEL', KEYS[1], id)
      answer = DONE
      if delay == 0 then
        redis.call('XADD', KEYS[1], '*', 'm', task, 'h', ARGV[at + 4])
      else
        local entry = cmsgpack.pack({ARGV[2], ARGV[at + 1], ARGV[at + 2], task, ARGV[at + 4], id})
        redis.call('ZADD', KEYS[3], now + delay, entry)
        moved(KEYS[2], ARGV[2], -1, -tonumber(ARGV[at + 1]), -tonumber(ARGV[at + 2]))
      end
    end
  end
  answers[#answers + 1] = answer
end
return answers

--- promote
-- KEYS delayed backlog stream…   ARGV group, then per entry: stream_index partition tokens bytes m h member
-- -> how many came back
local wrong = wrong_type(KEYS[1], 'zset') or wrong_type(KEYS[2], 'hash')
if wrong then return wrong end
for i = 3, #KEYS do
  wrong = wrong_type(KEYS[i], 'stream')
  if wrong then return wrong end
end
local promoted = 0
for at = 2, #ARGV, 7 do
  if redis.call('ZREM', KEYS[1], ARGV[at + 6]) == 1 then
    local stream = KEYS[2 + tonumber(ARGV[at])]
    ensure_group(stream, ARGV[1])
    redis.call('XADD', stream, '*', 'm', ARGV[at + 4], 'h', ARGV[at + 5])
    moved(KEYS[2], ARGV[at + 1], 1, tonumber(ARGV[at + 2]), tonumber(ARGV[at + 3]))
    promoted = promoted + 1
  end
end
return promoted

--- bury
-- KEYS stream backlog dead [results job jobs]   ARGV group partition id tokens bytes dead_max counts name
--      n field × n, r result field × r. An empty partition means the ingress, which has no backlog;
--      counts is 1 when this task was not counted as submitted yet
-- -> DONE | SUPERSEDED
local wrong = wrong_type(KEYS[1], 'stream') or wrong_type(KEYS[2], 'hash') or wrong_type(KEYS[3], 'stream')
  or (KEYS[4] and (wrong_type(KEYS[4], 'stream') or wrong_type(KEYS[5], 'hash')
  or wrong_type(KEYS[6], 'set')))
if wrong then return wrong end
if redis.call('XACK', KEYS[1], ARGV[1], ARGV[3]) ~= 1 then return SUPERSEDED end
local present = redis.call('XDEL', KEYS[1], ARGV[3])
local n = tonumber(ARGV[9])
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[6], '*', unpack(slice(10, n)))
if ARGV[2] ~= '' and present == 1 then
  moved(KEYS[2], ARGV[2], -1, -tonumber(ARGV[4]), -tonumber(ARGV[5]))
end
if KEYS[4] then
  redis.call('XADD', KEYS[4], '*', unpack(slice(11 + n, tonumber(ARGV[10 + n]))))
  redis.call('HINCRBY', KEYS[5], 'error', 1)
  if ARGV[7] == '1' then redis.call('HINCRBY', KEYS[5], 'submitted', 1) end
  redis.call('SADD', KEYS[6], ARGV[8])
end
return DONE

--- cancel
-- The fence is XDEL here: an entry that nobody holds yet has nothing to acknowledge. Its XACK in the
-- same step makes a result that is still being generated superseded.
-- KEYS stream backlog results job   ARGV group partition, then per entry: id tokens bytes n field × n
-- -> how many were cancelled
local wrong = wrong_type(KEYS[1], 'stream') or wrong_type(KEYS[2], 'hash')
  or wrong_type(KEYS[3], 'stream') or wrong_type(KEYS[4], 'hash')
if wrong then return wrong end
local cancelled, at = 0, 3
while at <= #ARGV do
  local n = tonumber(ARGV[at + 3])
  if redis.call('XDEL', KEYS[1], ARGV[at]) == 1 then
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[at])
    redis.call('XADD', KEYS[3], '*', unpack(slice(at + 4, n)))
    moved(KEYS[2], ARGV[2], -1, -tonumber(ARGV[at + 1]), -tonumber(ARGV[at + 2]))
    cancelled = cancelled + 1
  end
  at = at + 4 + n
end
if cancelled > 0 then redis.call('HINCRBY', KEYS[4], 'cancelled', cancelled) end
return cancelled

--- enrol
-- Heartbeats must go through at maxmemory too, else those who drain Redis would be declared dead. So
-- this and renew begin with a write that is allowed there; nobody sees the gap.
-- KEYS roster   ARGV incarnation
redis.call('SREM', KEYS[1], ARGV[1])
return redis.call('SADD', KEYS[1], ARGV[1])

--- renew
-- KEYS consumer   ARGV facts ttl_ms
redis.call('DEL', KEYS[1])
return redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])

--- forget
-- Remove a consumer's name where nothing is pending for it. XGROUP DELCONSUMER drops pending entries
-- for ever, so it stands behind a check in the same step.
-- KEYS roster stream…   ARGV group incarnation   -> entries that are still pending
local pending = 0
for i = 2, #KEYS do
  local held = redis.pcall('XPENDING', KEYS[i], ARGV[1], '-', '+', 1, ARGV[2])
  if not held.err then
    if #held == 0 then
      redis.pcall('XGROUP', 'DELCONSUMER', KEYS[i], ARGV[1], ARGV[2])
    else
      pending = pending + 1
    end
  end
end
if pending == 0 then redis.call('SREM', KEYS[1], ARGV[2]) end
return pending

--- reap
-- Remove partition streams that hold nothing, so that memory returns to its baseline.
-- KEYS stream…   ARGV group   -> how many went
local reaped = 0
for i = 1, #KEYS do
  if redis.call('TYPE', KEYS[i]).ok == 'stream' and redis.call('XLEN', KEYS[i]) == 0 then
    local summary = redis.pcall('XPENDING', KEYS[i], ARGV[1])
    if summary.err or summary[1] == 0 then reaped = reaped + redis.call('DEL', KEYS[i]) end
  end
end
return reaped

--- recount
-- Make the backlog tell the truth again after a foreign hand wrote to or removed a partition stream.
-- KEYS backlog stream…   ARGV partition…   -> how many fields were wrong
local wrong = wrong_type(KEYS[1], 'hash')
if wrong then return wrong end
local known, mended, total = {}, 0, 0
local flat = redis.call('HGETALL', KEYS[1])
for i = 1, #flat, 2 do known[flat[i]] = tonumber(flat[i + 1]) end
local function put(field, value)
  if (known[field] or 0) ~= value then
    mended = mended + 1
    if value == 0 then redis.call('HDEL', KEYS[1], field) else redis.call('HSET', KEYS[1], field, value) end
  end
  known[field] = nil
end
for i = 2, #KEYS do
  local partition = ARGV[i - 1]
  local length = redis.call('TYPE', KEYS[i]).ok == 'stream' and redis.call('XLEN', KEYS[i]) or 0
  local before, tokens = known[partition] or 0, known[partition .. ':t'] or 0
  if length == 0 then
    tokens = 0  -- what foreign headers left over
  elseif length ~= before then
    tokens = before > 0 and math.floor(tokens * length / before) or 256 * length
  end
  put(partition .. ':t', tokens)
  put(partition, length)
  total = total + length
end
for field, value in pairs(known) do
  -- A partition that appeared after the caller looked: count it, leave it alone.
  if field ~= 'tasks' and field ~= 'bytes' and string.sub(field, -2) ~= ':t' then
    total = total + value
  end
end
local before, bytes = known['tasks'] or 0, known['bytes'] or 0
if total == 0 then
  put('bytes', 0)
elseif total ~= before then
  put('bytes', before > 0 and math.floor(bytes * total / before) or 1024 * total)
end
put('tasks', total)
return mended
