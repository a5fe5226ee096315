"""Protos to the values of `cluster` and back, with the checks that the wire needs.

Called by `server`, `rmanager_client` and `store`; nothing inside the gManager sees a proto.
"""

import itertools
import math
from collections.abc import Collection

from protos.infinite_llm.v1 import gmanager_pb2, types_pb2
from services.common.errors import InvalidRequest
from services.common.ids import Incarnation, InstId, ReqId
from services.gmanager.cluster import (
    BatchPoint,
    Heartbeat,
    Instance,
    InstanceInfo,
    InstanceLoad,
    LinkTerms,
    PerfConstants,
    PlacementEntry,
)


def info_from_proto(proto: types_pb2.InstanceInfo) -> InstanceInfo:
    """Raises InvalidRequest where the gManager could not work with what the instance says."""
    for name in ("incarnation", "control_address", "block_size", "num_blocks"):
        if not getattr(proto, name):
            raise InvalidRequest(f"instance {proto.inst_id}: {name} is missing", f"info.{name}")
    return InstanceInfo(
        inst_id=InstId(proto.inst_id),
        incarnation=Incarnation(proto.incarnation),
        control_address=proto.control_address,
        data_address=proto.data_address,
        model=proto.model,
        block_size=proto.block_size,
        num_blocks=proto.num_blocks,
        block_bytes=proto.block_bytes,
        max_model_len=proto.max_model_len,
        perf=_perf_from_proto(proto.perf),
        node=proto.node,
        max_lent_blocks=(
            proto.max_lent_blocks if proto.HasField("max_lent_blocks") else proto.num_blocks
        ),
    )


def _perf_from_proto(proto: types_pb2.PerfConstants) -> PerfConstants:
    perf = PerfConstants(
        non_attention=tuple(BatchPoint(point.batch, point.step_s) for point in proto.non_attention),
        attention_s_per_token=proto.attention_s_per_token,
        link_round_trip_s=proto.link_round_trip_s,
        link_bytes_per_s=proto.link_bytes_per_s,
        num_layers=proto.num_layers,
        row_bytes=proto.row_bytes,
        links={
            InstId(link.inst_id): LinkTerms(link.round_trip_s, link.bytes_per_s)
            for link in proto.links
        },
    )
    seconds = (
        perf.attention_s_per_token,
        perf.link_round_trip_s,
        perf.link_bytes_per_s,
        *itertools.chain.from_iterable(perf.links.values()),
    )
    if not all(math.isfinite(value) and value >= 0 for value in seconds):
        raise InvalidRequest("perf constants must be finite and not negative", "info.perf")
    batches = [0.0, *(point.batch for point in perf.non_attention)]
    is_rising = all(left < right for left, right in itertools.pairwise(batches))
    if not is_rising or not all(0 < point.step_s < math.inf for point in perf.non_attention):
        raise InvalidRequest(
            "the curve must have rising batches from 1 and finite times above 0",
            "info.perf.non_attention",
        )
    return perf


def info_to_proto(info: InstanceInfo) -> types_pb2.InstanceInfo:
    proto = _identity_to_proto(info)
    perf = info.perf
    proto.perf.CopyFrom(
        types_pb2.PerfConstants(
            non_attention=[
                types_pb2.BatchPoint(batch=int(point.batch), step_s=point.step_s)
                for point in perf.non_attention
            ],
            attention_s_per_token=perf.attention_s_per_token,
            link_round_trip_s=perf.link_round_trip_s,
            link_bytes_per_s=perf.link_bytes_per_s,
            num_layers=perf.num_layers,
            row_bytes=perf.row_bytes,
            links=[
                types_pb2.LinkTerms(
                    inst_id=inst_id, round_trip_s=link.round_trip_s, bytes_per_s=link.bytes_per_s
                )
                for inst_id, link in perf.links.items()
            ],
        )
    )
    return proto


def _identity_to_proto(info: InstanceInfo) -> types_pb2.InstanceInfo:
    return types_pb2.InstanceInfo(
        inst_id=info.inst_id,
        incarnation=info.incarnation,
        control_address=info.control_address,
        data_address=info.data_address,
        model=info.model,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        block_bytes=info.block_bytes,
        max_model_len=info.max_model_len,
        node=info.node,
        max_lent_blocks=info.max_lent_blocks,
    )


def peer_to_proto(instance: Instance) -> types_pb2.InstanceView:
    """What a borrower has to know of it."""
    load = instance.load
    return types_pb2.InstanceView(
        info=_identity_to_proto(instance.info),
        load=types_pb2.InstanceLoad(free_blocks=load.free_blocks, draining=load.draining),
    )


def load_from_proto(proto: types_pb2.InstanceLoad) -> InstanceLoad:
    return InstanceLoad(
        free_blocks=proto.free_blocks,
        lent_blocks=proto.lent_blocks,
        borrowed_blocks=proto.borrowed_blocks,
        running=proto.running,
        waiting=proto.waiting,
        waiting_blocks=proto.waiting_blocks,
        tokens_per_s=proto.tokens_per_s,
        running_tokens=proto.running_tokens,
        draining=proto.draining,
        waiting_sizes=tuple(proto.waiting_sizes),
    )


def load_to_proto(load: InstanceLoad) -> types_pb2.InstanceLoad:
    return types_pb2.InstanceLoad(
        free_blocks=load.free_blocks,
        lent_blocks=load.lent_blocks,
        borrowed_blocks=load.borrowed_blocks,
        running=load.running,
        waiting=load.waiting,
        waiting_blocks=load.waiting_blocks,
        tokens_per_s=load.tokens_per_s,
        running_tokens=load.running_tokens,
        draining=load.draining,
        waiting_sizes=load.waiting_sizes,
    )


def view_from_proto(proto: types_pb2.InstanceView, now_s: float) -> Instance:
    info, load = info_from_proto(proto.info), load_from_proto(proto.load)
    return Instance(info, load, last_heartbeat_s=now_s - proto.age_s)


def view_to_proto(
    instance: Instance, now_s: float, with_perf: bool = True
) -> types_pb2.InstanceView:
    return types_pb2.InstanceView(
        info=(info_to_proto if with_perf else _identity_to_proto)(instance.info),
        load=load_to_proto(instance.load),
        age_s=max(0.0, now_s - instance.last_heartbeat_s),
    )


def entry_from_proto(proto: types_pb2.RequestPlacementEntry) -> PlacementEntry:
    return PlacementEntry(
        req_id=ReqId(proto.req_id),
        inst_id=InstId(proto.inst_id),
        num_blocks=proto.num_blocks,
        local=proto.local,
        owner_inst_id=InstId(proto.owner_inst_id),
    )


def entry_to_proto(entry: PlacementEntry) -> types_pb2.RequestPlacementEntry:
    return types_pb2.RequestPlacementEntry(
        req_id=entry.req_id,
        inst_id=entry.inst_id,
        num_blocks=entry.num_blocks,
        local=entry.local,
        owner_inst_id=entry.owner_inst_id,
    )


def rows_to_proto(inst_id: InstId, rows: Collection[PlacementEntry]) -> types_pb2.InstanceRows:
    return types_pb2.InstanceRows(
        inst_id=inst_id,
        req_ids=[row.req_id for row in rows],
        num_blocks=[row.num_blocks for row in rows],
        owner_inst_ids=[row.owner_inst_id for row in rows],
    )


def rows_from_proto(proto: types_pb2.InstanceRows) -> list[PlacementEntry]:
    """Raises ValueError where a column is shorter than another."""
    inst_id = InstId(proto.inst_id)
    return [
        PlacementEntry(ReqId(req_id), inst_id, num_blocks, owner == inst_id, InstId(owner))
        for req_id, num_blocks, owner in zip(
            proto.req_ids, proto.num_blocks, proto.owner_inst_ids, strict=True
        )
    ]


def heartbeat_from_proto(proto: gmanager_pb2.HeartbeatRequest) -> Heartbeat:
    return Heartbeat(
        inst_id=InstId(proto.inst_id),
        incarnation=Incarnation(proto.incarnation),
        sequence_number=proto.sequence_number,
        full=proto.full,
        entries=tuple(map(entry_from_proto, proto.entries)),
        load=load_from_proto(proto.load) if proto.HasField("load") else None,
        perf=_perf_from_proto(proto.perf) if proto.HasField("perf") else None,
    )
