"""A rate of tokens, kept over any minute. Pure.

What a request costs is known only when it has ended, so one may go while the bucket is not empty,
and what it takes beyond that is a debt which those after it wait for.
"""


class TokenBucket:
    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._per_s = per_minute / 60
        self._level = float(per_minute)
        self._as_of_s = now_s

    def take(self, num_tokens: int, now_s: float) -> None:
        self._level = self._level_at(now_s) - num_tokens
        self._as_of_s = max(self._as_of_s, now_s)

    def remaining(self, now_s: float) -> int:
        return max(0, int(self._level_at(now_s)))

    def wait_s(self, now_s: float) -> float:
        """How long until a request may go; 0: now."""
        missing = 1 - self._level_at(now_s)
        return max(0.0, missing / self._per_s)

    def full_in_s(self, now_s: float) -> float:
        return (self.per_minute - self._level_at(now_s)) / self._per_s

    def _level_at(self, now_s: float) -> float:
        gained = max(0.0, now_s - self._as_of_s) * self._per_s
        return min(float(self.per_minute), self._level + gained)
