"""What soak and chaos send: random requests from one seed, so that a run can be repeated. Pure."""

from dataclasses import dataclass
from random import Random

from protos.infinite_llm.v1 import types_pb2

#: Plain words of the built-in model's vocabulary.
_FIRST_TOKEN, _LAST_TOKEN = 300, 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Scenario:
    """One request; `abort_after` tokens its caller leaves, if set."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: types_pb2.SamplingParams
    priority: int = 0
    abort_after: int | None = None


def checked_scenarios(
    random: Random, count: int, capacity_tokens: int, max_tokens: tuple[int, int] = (4, 16)
) -> list[Scenario]:
    """Requests whose tokens are known beforehand, between the two `max_tokens` long; some share
    their beginning, some outgrow one instance of `capacity_tokens`."""
    beginning = _words(random, 48)
    lengths = [random.choice((5, 40, 90, 200)) for _ in range(count - 2)]
    lengths += [capacity_tokens + 60, capacity_tokens + 150]
    return [
        Scenario(
            (*(beginning if index % 2 else ()), *_words(random, length)),
            random.randint(*max_tokens),
            _sampling(random),
        )
        for index, length in enumerate(lengths)
    ]


def random_scenario(random: Random, capacity_tokens: int) -> Scenario:
    """Anything a caller may do; its tokens are not checked."""
    length = min(int(random.paretovariate(0.9) * 12), capacity_tokens + 100)
    max_tokens = random.choice((1, 4, 16, 48))
    is_aborted = random.random() < 0.3
    return Scenario(
        _words(random, length),
        max_tokens,
        _sampling(random),
        priority=random.choice((0, 0, 0, 1, -1)),
        abort_after=random.randrange(max_tokens) if is_aborted else None,
    )


def _words(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(max(1, count)))


def _sampling(random: Random) -> types_pb2.SamplingParams:
    if random.random() < 0.6:
        return types_pb2.SamplingParams()
    return types_pb2.SamplingParams(
        temperature=random.uniform(0.3, 1.2), top_p=0.9, seed=random.randrange(1000)
    )
