"""The command line that the benchmarks share."""

import argparse
import os
import sys
from collections.abc import Callable

from services.common.errors import InfiniteLLMError
from services.local.options import DTYPES

_KV_DTYPES = ("float32", "float16", "bfloat16")
_EXIT_FAILURE = 1
_EXIT_INTERRUPTED = 130


def new_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer steps and prompts")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of our weights")
    parser.add_argument("--kv-dtype", choices=_KV_DTYPES, default="float32", help="of our KVCache")
    parser.add_argument("--threads", type=_thread_count, default=_available_threads())
    return parser


def run(main: Callable[[list[str]], None]) -> int:
    """The exit status; an error of ours is one line."""
    try:
        main(sys.argv[1:])
    except InfiniteLLMError as error:
        print(error.message, file=sys.stderr)
        return _EXIT_FAILURE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _thread_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of threads")
    return int(text)


def _available_threads() -> int:
    """One for each core that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
