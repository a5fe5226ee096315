"""Values with sensible defaults, so that a test names only what it is about."""

from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager.cluster import (
    BatchPoint,
    Cluster,
    Heartbeat,
    Instance,
    InstanceInfo,
    InstanceLoad,
    PerfConstants,
    PlacementEntry,
    PlacementView,
)
from services.gmanager.placement_map import PlacementMap

#: Reading the weights takes 10 ms whatever the batch, a request 1 ms on top; links cost nothing.
PERF = PerfConstants(
    non_attention=(BatchPoint(1, 0.011), BatchPoint(101, 0.111)),
    attention_s_per_token=1e-6,
)


def make_info(
    inst_id: int,
    *,
    incarnation: int = 1,
    num_blocks: int = 100,
    host: str = "10.0.0.1",
    model: str = "m",
    perf: PerfConstants = PERF,
    max_lent_blocks: int | None = None,
) -> InstanceInfo:
    """`host` is its node, too."""
    return InstanceInfo(
        inst_id=InstId(inst_id),
        incarnation=Incarnation(incarnation),
        control_address=f"{host}:{9000 + inst_id}",
        data_address=f"tcp:{host}:{9500 + inst_id}",
        model=model,
        block_size=16,
        num_blocks=num_blocks,
        block_bytes=4096,
        max_model_len=8192,
        perf=perf,
        node=host,
        max_lent_blocks=num_blocks if max_lent_blocks is None else max_lent_blocks,
    )


def make_instance(
    inst_id: int,
    load: InstanceLoad | None = None,
    *,
    num_blocks: int = 100,
    host: str = "10.0.0.1",
    model: str = "m",
    perf: PerfConstants = PERF,
) -> Instance:
    info = make_info(inst_id, num_blocks=num_blocks, host=host, model=model, perf=perf)
    return Instance(info, load or InstanceLoad(free_blocks=num_blocks), last_heartbeat_s=0.0)


def make_row(
    req_id: int, inst_id: int, num_blocks: int, owner: int | None = None
) -> PlacementEntry:
    owner_inst_id = InstId(inst_id if owner is None else owner)
    return PlacementEntry(
        req_id=ReqId(req_id),
        inst_id=InstId(inst_id),
        num_blocks=num_blocks,
        local=owner_inst_id == inst_id,
        owner_inst_id=owner_inst_id,
    )


def make_heartbeat(
    inst_id: int,
    sequence_number: int,
    *rows: PlacementEntry,
    incarnation: int = 1,
    full: bool = False,
    load: InstanceLoad | None = None,
) -> Heartbeat:
    return Heartbeat(
        InstId(inst_id), Incarnation(incarnation), sequence_number, full, tuple(rows), load
    )


def view_of(cluster: Cluster) -> PlacementView:
    placement_map = PlacementMap()
    placement_map.restore(cluster, now_s=0.0)
    return placement_map.snapshot()
