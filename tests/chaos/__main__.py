"""`python -m tests.chaos [--minutes 5] [--seed N]`: last line one JSON object."""

import argparse
import sys
from dataclasses import replace

from tests.chaos.network import network_of
from tests.chaos.run import Chaos, ChaosTally
from tests.chaos.schedule import draw_schedule
from tests.integration.cluster import make_spec, running_cluster
from tests.soak.command import random_run

NUM_INSTANCES = 3
NUM_GMANAGERS = 2
#: Of each instance: the streams need most of what the three have together.
NUM_BLOCKS = 80


async def chaos(args: argparse.Namespace) -> ChaosTally:
    duration_s = 60 * args.minutes
    schedule = draw_schedule(args.seed, duration_s, NUM_INSTANCES, NUM_GMANAGERS)
    for fault in sorted(schedule.all, key=lambda fault: fault.at_s):
        print(fault)
    spec = replace(make_spec(NUM_INSTANCES, NUM_BLOCKS), num_gmanagers=NUM_GMANAGERS)
    async with (
        network_of(NUM_INSTANCES) as network,
        running_cluster(spec, network.place) as cluster,
    ):
        return await Chaos(cluster, network, args.seed).run(schedule, duration_s)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    return random_run(parser, 5.0, chaos)


if __name__ == "__main__":
    sys.exit(main())
