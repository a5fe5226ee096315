"""`python -m tests.soak [--minutes 30] [--seed N] [--instances 2]`: last line one JSON object."""

import argparse
import sys

from tests.integration.cluster import make_spec, running_cluster
from tests.soak.command import random_run
from tests.soak.run import Soak, SoakTally


async def soak(args: argparse.Namespace) -> SoakTally:
    async with running_cluster(make_spec(args.instances)) as cluster:
        return await Soak(cluster, args.seed).run(60 * args.minutes)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--instances", type=int, default=2)
    return random_run(parser, 30.0, soak)


if __name__ == "__main__":
    sys.exit(main())
