"""`python -m tests.soak [--minutes 30] [--seed N] [--instances 2]`: last line one JSON object."""

import argparse
import asyncio
import json
import secrets
import sys

from tests.integration.cluster import make_spec, running_cluster
from tests.soak.run import Soak, Tally


async def soak(minutes: float, seed: int, num_instances: int) -> Tally:
    async with running_cluster(make_spec(num_instances)) as cluster:
        return await Soak(cluster, seed).run(60 * minutes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--instances", type=int, default=2)
    args = parser.parse_args()
    print(f"seed {args.seed}")
    tally = asyncio.run(soak(args.minutes, args.seed, args.instances))
    print(json.dumps(tally.as_json()))
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
