"""`python -m services.router.access NAME >> KEYS_FILE`: makes a key and the line that lets it in.

The line goes to stdout; the key itself to stderr, this once, since the file has only its hash.
"""

import argparse
import secrets
import sys
from collections.abc import Sequence

from services.common.errors import ConfigError
from services.router.access.keys import ApiKey, KeyLimits, digest_of

#: Of keys that were made elsewhere: shorter ones can be guessed from their hash.
MIN_KEY_CHARS = 20


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    key = sys.stdin.readline().strip() if options.stdin else f"sk-{secrets.token_urlsafe(32)}"
    if len(key) < MIN_KEY_CHARS:
        print(f"a key must have at least {MIN_KEY_CHARS} random characters", file=sys.stderr)
        return 2
    limits = {"max_concurrent": options.max_concurrent}
    limits["tokens_per_minute"] = options.tokens_per_minute
    try:
        entry = ApiKey(options.name, digest_of(key), KeyLimits(**limits))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    if not options.stdin:
        print(key, file=sys.stderr)
    print(entry.line())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m services.router.access", description=__doc__)
    parser.add_argument("name", help="whose key it is; shown in the log")
    parser.add_argument("--max-concurrent", type=int, help="requests at once")
    parser.add_argument("--tokens-per-minute", type=int, help="of prompts and answers together")
    parser.add_argument("--stdin", action="store_true", help="hash a key from stdin instead")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
