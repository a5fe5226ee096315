"""Refines the constants of the performance model from the steps that the engine really makes.

`profiling` measures them once, at start, on an otherwise idle machine. Here they follow what a
step takes now: f(batch) + tokens / g, linear in its knots and in 1/g, so recursive least squares
(a Kalman filter whose state drifts slowly) finds both from any mixture of steps. Pure; fed by the
rManager with each heartbeat.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos.infinite_llm.v1 import types_pb2

_KNOTS = tuple(2**power for power in range(9))
#: How far a first measurement may be off, as a share of itself.
_PRIOR_SHARE = 0.3
#: How far one step is off its expectation without anything having changed.
_NOISE_SHARE = 0.05
#: So much of what was learnt is doubted again with each step, for the truth may change.
_DOUBT_SHARE = 0.003
#: A surprise counts for no more than this share of what was expected: steps are disturbed now and
#: then, by other processes or a block that is copied, and disturbed steps only ever take longer.
_MAX_SURPRISE_SHARE = 0.05
#: Neighbouring knots, a factor of e apart, err together by this much.
_KNOT_CORRELATION = 0.7
#: A constant never falls below this share of its first measurement.
_FLOOR_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Seconds of a step without attention, by batch; and of attention, for each token."""

    batches: tuple[int, ...]
    non_attention_s: tuple[float, ...]
    attention_s_per_token: float

    def step_s(self, batch: int, attended_tokens: int) -> float:
        weights = _hat(self.batches, batch)
        attention_s = self.attention_s_per_token * attended_tokens
        return float(weights @ np.asarray(self.non_attention_s)) + attention_s

    def differs_from(self, other: "StepConstants", share: float) -> bool:
        """Whether any of its constants is off by more than this share."""
        mine = (*self.non_attention_s, self.attention_s_per_token)
        theirs = [other.step_s(batch, 0) for batch in self.batches]
        pairs = zip(mine, (*theirs, other.attention_s_per_token), strict=True)
        return any(abs(a - b) > share * b for a, b in pairs)


def step_constants(perf: types_pb2.PerfConstants) -> StepConstants:
    return StepConstants(
        tuple(point.batch for point in perf.non_attention),
        tuple(point.step_s for point in perf.non_attention),
        perf.attention_s_per_token,
    )


def set_step_constants(perf: types_pb2.PerfConstants, constants: StepConstants) -> None:
    points = zip(constants.batches, constants.non_attention_s, strict=True)
    del perf.non_attention[:]
    perf.non_attention.extend(types_pb2.BatchPoint(batch=b, step_s=s) for b, s in points)
    perf.attention_s_per_token = constants.attention_s_per_token


class PerfEstimator:
    def __init__(self, start: StepConstants) -> None:
        """`start`: as measured; between its batches, and beyond, knots are put at powers of two."""
        self._batches = tuple(sorted({*start.batches, *_KNOTS}))
        first = [_first_guess_s(start, batch) for batch in self._batches]
        self._first = np.array([*first, start.attention_s_per_token])
        self._state = self._first.copy()
        self._prior = _prior_covariance(self._batches, self._first)
        self._covariance = self._prior.copy()

    def observe(self, batch: int, attended_tokens: int, step_s: float) -> None:
        """One step in which every sequence of the batch computed one token."""
        row = np.append(_hat(self._batches, batch), attended_tokens)
        expected_s = float(row @ self._state)
        limit_s = _MAX_SURPRISE_SHARE * expected_s
        surprise_s = min(max(step_s - expected_s, -limit_s), limit_s)
        self._covariance = self._covariance + _DOUBT_SHARE * (self._prior - self._covariance)
        noise = (_NOISE_SHARE * expected_s) ** 2
        spread = self._covariance @ row
        gain = spread / (float(row @ spread) + noise)
        self._state = self._state + gain * surprise_s
        self._covariance = self._covariance - np.outer(gain, spread)
        self._state = np.maximum(self._state, _FLOOR_SHARE * self._first)

    @property
    def constants(self) -> StepConstants:
        *knots, attention = self._state.tolist()
        return StepConstants(self._batches, tuple(knots), attention)


def _first_guess_s(start: StepConstants, batch: int) -> float:
    last, last_s = start.batches[-1], start.non_attention_s[-1]
    if len(start.batches) == 1:
        return last_s * max(1.0, batch / last)
    # Noise in the last two points must not make ever larger batches ever faster.
    return max(last_s, start.step_s(batch, 0)) if batch > last else start.step_s(batch, 0)


def _hat(batches: Sequence[int], batch: int) -> NDArray[np.float64]:
    """The share of each knot in the value at `batch`: linear between them, and beyond the last."""
    weights = np.zeros(len(batches))
    if batch <= batches[0] or len(batches) == 1:
        weights[0] = 1.0
        return weights
    right = min(int(np.searchsorted(batches, batch)), len(batches) - 1)
    share = (batch - batches[right - 1]) / (batches[right] - batches[right - 1])
    weights[right - 1], weights[right] = 1 - share, share
    return weights


def _prior_covariance(batches: Sequence[int], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each constant is as uncertain as its size; a knot that is seen corrects its neighbours."""
    logs = np.log(batches)
    correlation = np.eye(len(first))
    correlation[:-1, :-1] = _KNOT_CORRELATION ** np.abs(logs[:, None] - logs[None, :])
    spread = _PRIOR_SHARE * first
    return np.outer(spread, spread) * correlation
