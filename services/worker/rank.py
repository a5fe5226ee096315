"""Who has first claim on memory: one order over all requests of the cluster. Pure.

Because every instance goes by the same order, no two can wait for each other: the older of two
requests takes what it needs from the younger one, which waits (paper section 6 leaves this open).
"""

from typing import NamedTuple

from services.common.ids import ReqId


class Rank(NamedTuple):
    """The smaller goes first: by priority, then by age."""

    priority: int
    arrived_at_s: float
    """When the router took the request in, by its wall clock; the same wherever it goes on."""
    req_id: ReqId
    """Between equals."""
