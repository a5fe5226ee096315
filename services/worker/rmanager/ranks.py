"""Ranks to and from the wire."""

import math

from protos.infinite_llm.v1 import types_pb2
from services.common.errors import InvalidRequest
from services.common.ids import ReqId
from services.worker.rank import Rank


def check_arrival(arrived_at_s: float) -> float:
    """Anything but a number would leave requests without an order."""
    if not math.isfinite(arrived_at_s):
        raise InvalidRequest("arrived_at_s must be a number of seconds", "arrived_at_s")
    return arrived_at_s


def rank_from_wire(rank: types_pb2.Rank) -> Rank:
    return Rank(rank.priority, check_arrival(rank.arrived_at_s), ReqId(rank.req_id))


def rank_to_wire(rank: Rank) -> types_pb2.Rank:
    return types_pb2.Rank(
        priority=rank.priority, arrived_at_s=rank.arrived_at_s, req_id=rank.req_id
    )
