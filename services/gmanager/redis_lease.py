"""The lease in Redis that decides which gManager leads. Asked by `election`.

One script claims, renews and tells who holds it, so that every answer is true at one moment. The
term is kept beside the lease and outlives it. It is at least the time in milliseconds, and above
what the claimant has heard of, so that it grows even where Redis has lost everything.
"""

import asyncio
from secrets import token_hex
from typing import Any, cast

from redis.asyncio import Redis

from services.common.ids import Term
from services.gmanager.leadership import Claim
from services.gmanager.redis_connection import REDIS_DEADLINE_S, REDIS_ERRORS, RedisState

LEASE_KEY = "infinite_llm:leader"
TERM_KEY = "infinite_llm:term"

# A renewal takes no memory, so that a full Redis does not depose the leader. Numbers up to 2^53
# are exact in Lua; milliseconds reach that in the year 287396.
_CLAIM = """
local holder = redis.call('HGET', KEYS[1], 'holder')
local term = tonumber(redis.call('HGET', KEYS[1], 'term') or '0')
local known = tonumber(ARGV[4])
if holder == ARGV[1] and term >= known then
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
elseif holder == ARGV[1] or not holder then
    local time = redis.call('TIME')
    local stored = tonumber(redis.call('GET', KEYS[2]) or '0')
    local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
    term = math.max(stored + 1, known + 1, now_ms)
    redis.call('SET', KEYS[2], string.format('%.0f', term))
    redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'address', ARGV[2],
               'term', string.format('%.0f', term))
    redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return {redis.call('HGET', KEYS[1], 'holder'), redis.call('HGET', KEYS[1], 'address'),
        redis.call('HGET', KEYS[1], 'term'), redis.call('PTTL', KEYS[1])}
"""
_RELEASE = """
if redis.call('HGET', KEYS[1], 'holder') == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class RedisLease:
    def __init__(self, redis: Redis, address: str, lease_s: float, state: RedisState) -> None:
        """`address`: where others reach the service of this process."""
        self._redis = redis
        self._address = address
        self._state = state
        self._lease_ms = round(lease_s * 1000)
        #: How often to claim, and how long to wait for the answer: twice within half a lease.
        self.period_s = lease_s / 4
        self._deadline_s = min(REDIS_DEADLINE_S, self.period_s)
        self._holder = token_hex(8)

    async def claim(self, known_term: Term) -> Claim | None:
        """Takes or renews the lease if nobody else has it, and tells who does.

        None where Redis does not answer; it may have granted the claim all the same.
        """
        answer = await self._call(
            _CLAIM, LEASE_KEY, TERM_KEY, self._holder, self._address, self._lease_ms, known_term
        )
        if answer is None:
            return None
        holder, address, term, remaining_ms = cast(tuple[bytes, bytes, bytes, int], answer)
        return Claim(
            is_mine=holder.decode() == self._holder,
            leader_address=address.decode(),
            term=Term(int(term)),
            remaining_s=remaining_ms / 1000,
        )

    async def release(self) -> None:
        """Lets the next one take it at once, where Redis answers."""
        await self._call(_RELEASE, LEASE_KEY, TERM_KEY, self._holder)

    async def _call(self, script: str, *arguments: str | int) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                # Not by its hash, which a Redis that was restarted would not know.
                answer = await self._redis.eval(script, 2, *arguments)
        except REDIS_ERRORS as error:
            self._state.failed(error)
            return None
        self._state.worked()
        return answer
