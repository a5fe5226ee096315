"""What the command lines of soak and chaos share: minutes and a seed in, one JSON line out."""

import argparse
import asyncio
import json
import secrets
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import Any

MUST_BE_ZERO = ("wrong_tokens", "hangs", "leaked_blocks")


@dataclass(slots=True)
class Tally:
    """What a run counted; the last three fields of every kind are `MUST_BE_ZERO`."""

    seed: int

    @property
    def has_failed(self) -> bool:
        return any(getattr(self, name) for name in MUST_BE_ZERO)


def random_run(
    parser: argparse.ArgumentParser,
    minutes: float,
    run: Callable[[argparse.Namespace], Coroutine[Any, Any, Tally]],
) -> int:
    """Returns the exit status: 1 where something is not 0 that must be."""
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    args = parser.parse_args()
    print(f"seed {args.seed}")
    tally = asyncio.run(run(args))
    print(json.dumps(asdict(tally)))
    return 1 if tally.has_failed else 0
