"""A cluster of instances that only say that they exist. For the benchmark of the control plane."""

import random
from dataclasses import dataclass

from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager.cluster import (
    BatchPoint,
    Cluster,
    Instance,
    InstanceInfo,
    InstanceLoad,
    PerfConstants,
    PlacementEntry,
)

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
#: As a GPU of some years ago has it: 20 ms to read the weights, 0.1 ms for a request on top.
_PERF = PerfConstants(
    non_attention=(BatchPoint(1, 0.0201), BatchPoint(64, 0.0264), BatchPoint(256, 0.0456)),
    attention_s_per_token=1e-8,
    link_round_trip_s=2e-5,
    link_bytes_per_s=1e10,
    num_layers=32,
    row_bytes=33_000,
)


@dataclass(frozen=True, slots=True)
class Shape:
    num_instances: int
    num_requests: int = 100
    """Running on each instance."""
    instances_per_node: int = 8


def simulate(shape: Shape, seed: int = 0) -> Cluster:
    """A third is full and has requests waiting, a third is full, a third is half empty.

    Every tenth of the full ones has lent out a part of its longest request already.
    """
    source = random.Random(seed)
    instances: list[Instance] = []
    entries: list[PlacementEntry] = []
    for inst_id in range(shape.num_instances):
        share = 0.5 if inst_id % 3 == 0 else 1.0
        rows = _requests(inst_id, shape.num_requests, int(share * NUM_BLOCKS), source)
        lent = (
            _loan(rows, (inst_id + 2) // 3 * 3 % shape.num_instances) if inst_id % 30 == 1 else []
        )
        num_waiting = source.randrange(4, 40) if inst_id % 3 == 1 else 0
        instances.append(_instance(inst_id, shape, rows, lent, num_waiting))
        entries += rows + lent
    return Cluster(tuple(instances), tuple(entries))


def _requests(
    inst_id: int, num_requests: int, num_blocks: int, source: random.Random
) -> list[PlacementEntry]:
    """Many short ones and one that holds about a third; together they fill the blocks."""
    weights = [source.random() for _ in range(num_requests)]
    weights[0] = source.uniform(0.3, 0.6) * sum(weights)
    scale = (num_blocks - num_requests) / sum(weights)
    return [
        PlacementEntry(
            req_id=ReqId(source.getrandbits(63)),
            inst_id=InstId(inst_id),
            num_blocks=1 + int(weight * scale),
            local=True,
            owner_inst_id=InstId(inst_id),
        )
        for weight in weights
    ]


def _loan(rows: list[PlacementEntry], creditor: int) -> list[PlacementEntry]:
    longest = max(rows, key=lambda row: row.num_blocks)
    return [PlacementEntry(longest.req_id, InstId(creditor), 64, False, longest.owner_inst_id)]


def _instance(
    inst_id: int,
    shape: Shape,
    rows: list[PlacementEntry],
    lent: list[PlacementEntry],
    num_waiting: int,
) -> Instance:
    used = sum(row.num_blocks for row in rows)
    sizes = tuple(8 + (inst_id * 7 + n * 13) % 120 for n in range(num_waiting))
    load = InstanceLoad(
        free_blocks=NUM_BLOCKS - used,
        borrowed_blocks=sum(row.num_blocks for row in lent),
        running=len(rows),
        waiting=num_waiting,
        waiting_blocks=sum(sizes),
        waiting_sizes=sizes[:32],
        running_tokens=used * BLOCK_SIZE,
    )
    info = InstanceInfo(
        inst_id=InstId(inst_id),
        incarnation=Incarnation(1 + inst_id),
        control_address=f"10.0.0.1:{7100 + inst_id}",
        data_address=f"tcp:10.0.0.1:{7100 + inst_id}",
        model="simulated",
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        block_bytes=BLOCK_SIZE * 32 * 2 * 8 * 128 * 2,
        max_model_len=131_072,
        perf=_PERF,
        node=f"node-{inst_id // shape.instances_per_node}",
        max_lent_blocks=NUM_BLOCKS,
    )
    return Instance(info, load, last_heartbeat_s=0.0)
