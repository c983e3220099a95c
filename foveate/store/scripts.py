"""Lua scripts: what must happen at once on the server, on keys of one slot. Time is the server's, never ours."""

from __future__ import annotations

# KEYS flight, token; ARGV owner, lease ms, token ttl ms. Returns the fencing token, or 0 when somebody else flies.
BEGIN_FLIGHT = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  local token = redis.call('INCR', KEYS[2])
  redis.call('PEXPIRE', KEYS[2], ARGV[3])
  return token
end
return 0
"""

# KEYS flight; ARGV owner, lease ms. Returns 1 while the lease is still ours.
RENEW_FLIGHT = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
"""

# KEYS flight; ARGV owner. Ends our lease and nobody else's.
END_FLIGHT = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
"""

# KEYS token, manifest; ARGV generation, manifest, ttl ms (0: none). A writer that was overtaken commits nothing.
COMMIT_MANIFEST = """
local newest = tonumber(redis.call('GET', KEYS[1]) or '0')
if newest > tonumber(ARGV[1]) then
  return 0
end
if tonumber(ARGV[3]) > 0 then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
else
  redis.call('SET', KEYS[2], ARGV[2])
end
return 1
"""

# KEYS a record; ARGV expected bytes ("" for none), new bytes, ttl ms. Returns 1 when the record was as expected.
COMPARE_AND_SET = """
local now = redis.call('GET', KEYS[1]) or ''
if now ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""

# KEYS any key. Returns the clock of the server that has it, as TIME does: the servers of a cluster need not agree.
SERVER_TIME = """
return redis.call('TIME')
"""

_NOW_MS = "local time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)\n"

# KEYS leases, services; ARGV address, record, lease ms. The newest process at an address has it.
REGISTER = (
    _NOW_MS
    + """
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
"""
)

# KEYS leases, services; ARGV address, record, lease ms. Marks the address as left, unless another process has it.
UNREGISTER = (
    _NOW_MS
    + """
if redis.call('HGET', KEYS[2], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[2], ARGV[1], '')
return 1
"""
)

# KEYS leases, services. Drops whose lease has ended; returns address, record, address, record, ...
REGISTERED = (
    _NOW_MS
    + """
for _, address in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now)) do
  redis.call('HDEL', KEYS[2], address)
  redis.call('ZREM', KEYS[1], address)
end
return redis.call('HGETALL', KEYS[2])
"""
)
