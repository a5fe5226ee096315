"""`python -m services.common.model_store [NAME]` prepares a model and prints its folder."""

import os
import sys

from services.common.errors import ConfigError
from services.common.model_store.store import DEFAULT_MODEL, default_cache_dir, resolve


def _show(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        _show("usage: python -m services.common.model_store [NAME]")
        return 2
    name = arguments[0] if arguments else DEFAULT_MODEL
    try:
        folder = resolve(name, default_cache_dir(os.environ), _show)
    except ConfigError as error:
        _show(error.message)
        return 2
    except KeyboardInterrupt:
        return 130
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
