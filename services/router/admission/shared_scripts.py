"""What routers that share a Redis run in it: each step of admission is one script, hence one atomic step. The time is
Redis's own, since the clocks of several machines differ.

    {prefix}:{tenant}:running     sorted set   request ids, by when their lease ends (ms)
    {prefix}:{tenant}:requests    hash         a bucket: level, and when it was that (ms)
    {prefix}:{tenant}:tokens      hash         the same
    {prefix}:{tenant}:pixels      hash         the same
    {prefix}:failed:{address}     hash         the same, of keys that nobody knows

The braces around tenant and address keep the keys of one script in one slot of a Redis Cluster. Every key expires when
it says nothing any more: a bucket when it is full again, a set when its last lease is over. Pure text.
"""

from __future__ import annotations

LIMITED = 1
CONCURRENCY = "concurrency"

_BUCKETS = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function level_of(key, burst)
  local found = redis.call('HMGET', key, 'level', 'at')
  local level, at = tonumber(found[1]), tonumber(found[2])
  if not level or not at then return burst end
  if at > now then  -- the clock was set back
    redis.call('HSET', key, 'at', now)
    at = now
  end
  return math.min(burst, level + (now - at) * burst / 60000)
end

local function keep(key, burst, level)
  redis.call('HSET', key, 'level', string.format('%.17g', level), 'at', now)
  redis.call('PEXPIRE', key, math.ceil((burst - level) * 60000 / burst) + 1000)
end

local function wait_ms(burst, level, amount)
  return math.ceil(math.max(0, math.min(amount, burst) - level) * 60000 / burst)
end
"""

ENTER = (
    _BUCKETS
    + """
-- KEYS: running, requests. ARGV: request id, lease in ms, most at once (0: no limit), requests a minute (0: no limit).
-- Answers {0}, or {1, what is full, ms until it is not}.
local most, burst = tonumber(ARGV[3]), tonumber(ARGV[4])
if most > 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
  if redis.call('ZCARD', KEYS[1]) >= most then return {1, 'concurrency', 0} end
end
if burst > 0 then
  local level = level_of(KEYS[2], burst)
  local wait = wait_ms(burst, level, 1)
  if wait > 0 then return {1, 'requests', wait} end
  keep(KEYS[2], burst, level - 1)
end
if most > 0 then
  redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return {0}
"""
)

CHARGE = (
    _BUCKETS
    + """
-- KEYS: buckets. ARGV: for each its name, what a minute holds and what is taken.
-- Takes all or nothing. Answers {0}, or {1, which has not enough, ms until it has}.
local levels = {}
for index, key in ipairs(KEYS) do
  local burst, amount = tonumber(ARGV[3 * index - 1]), tonumber(ARGV[3 * index])
  levels[index] = level_of(key, burst)
  local wait = wait_ms(burst, levels[index], amount)
  if wait > 0 then return {1, ARGV[3 * index - 2], wait} end
end
for index, key in ipairs(KEYS) do
  keep(key, tonumber(ARGV[3 * index - 1]), levels[index] - tonumber(ARGV[3 * index]))
end
return {0}
"""
)

SETTLE = (
    _BUCKETS
    + """
-- KEYS: a bucket. ARGV: what a minute holds, and what is given back.
local burst = tonumber(ARGV[1])
keep(KEYS[1], burst, math.min(burst, level_of(KEYS[1], burst) + tonumber(ARGV[2])))
return {0}
"""
)

LEAVE = """
-- KEYS: running. ARGV: request id.
redis.call('ZREM', KEYS[1], ARGV[1])
return {0}
"""

RENEW = """
-- KEYS: running. ARGV: lease in ms, request ids. Those that Redis has forgotten it knows again.
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + tonumber(ARGV[1])
for index = 2, #ARGV do redis.call('ZADD', KEYS[1], until_ms, ARGV[index]) end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return {0}
"""

MAY_TRY = (
    _BUCKETS
    + """
-- KEYS: failed. ARGV: how many a minute. Answers {0}, or {1, '', ms until it may}.
local burst = tonumber(ARGV[1])
local wait = wait_ms(burst, level_of(KEYS[1], burst), 1)
if wait > 0 then return {1, '', wait} end
return {0}
"""
)

FAILED = (
    _BUCKETS
    + """
-- KEYS: failed. ARGV: how many a minute.
local burst = tonumber(ARGV[1])
local level = level_of(KEYS[1], burst)
if level >= 1 then keep(KEYS[1], burst, level - 1) end
return {0}
"""
)
