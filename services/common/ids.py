"""Identities that cross process borders. Imported by every service."""

import secrets
from typing import NewType

InstId = NewType("InstId", int)
ReqId = NewType("ReqId", int)
MoveId = NewType("MoveId", int)
Incarnation = NewType("Incarnation", int)
#: Grows with every gManager that comes to lead; zero is none.
Term = NewType("Term", int)


def _random_id() -> int:
    # 63 bits: fits a signed column anywhere, and zero stays free to mean "none".
    return secrets.randbits(62) + 1


def new_req_id() -> ReqId:
    """Unique in the cluster without coordination; minted by the router."""
    return ReqId(_random_id())


def new_move_id() -> MoveId:
    return MoveId(_random_id())


def new_incarnation() -> Incarnation:
    """One number per process start, so that a restarted peer is never taken for its predecessor."""
    return Incarnation(_random_id())
