"""`python -m tests.chaos [--minutes 5] [--seed N]`: last line one JSON object."""

import argparse
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from services.local.cluster import LocalCluster
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
        run = Chaos(cluster, network, args.seed)
        has_ended = False
        try:
            tally = await run.run(schedule, duration_s)
            has_ended = True
            return tally
        finally:
            if run.tally.has_failed or not has_ended:
                keep_logs(cluster)


def keep_logs(cluster: LocalCluster) -> None:
    """The processes' own words go with the cluster's folder otherwise."""
    folder = Path(tempfile.mkdtemp(prefix="infinite-llm-chaos-"))
    for process in cluster.processes.values():
        shutil.copy(process.log_path, folder)
    print(f"the logs of its processes are in {folder}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    return random_run(parser, 5.0, chaos)


if __name__ == "__main__":
    sys.exit(main())
