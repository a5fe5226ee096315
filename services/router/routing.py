"""Which instance takes a request: filter -> score -> pick. Pure; used by dispatch.

Design: headroom of KV memory first, then the batch. A view is a heartbeat old, so the router adds
what it has sent since (`Dispatched`): otherwise a burst would all go to one instance.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.common.ids import Incarnation, InstId, ReqId

#: An instance silent for longer is not picked. Several heartbeats, so that one lost does no harm.
MAX_AGE_S = 5.0


@dataclass(frozen=True, slots=True)
class Instance:
    """What routing knows of one instance."""

    inst_id: InstId
    incarnation: Incarnation
    address: str
    model: str
    block_size: int
    num_blocks: int
    max_model_len: int
    free_blocks: int
    waiting_blocks: int
    batch: int
    """Requests running or waiting."""
    draining: bool
    age_s: float
    """How old the report was when the view was taken."""
    reported_at_s: float
    """When the instance reported this, on the router's clock."""
    num_waiting: int = 0
    """Requests that wait there for memory."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(slots=True)
class _Sent:
    num_blocks: int
    at_s: float


class Dispatched:
    """What was sent to each instance and is not in its report yet. Owner: the dispatcher."""

    def __init__(self) -> None:
        #: By instance, since every pick asks for each of them.
        self._sent = defaultdict[InstId, dict[ReqId, _Sent]](dict)

    def add(self, req_id: ReqId, inst_id: InstId, num_blocks: int, now_s: float) -> None:
        self._sent[inst_id][req_id] = _Sent(num_blocks, now_s)

    def remove(self, req_id: ReqId, inst_id: InstId) -> None:
        self._sent[inst_id].pop(req_id, None)
        if not self._sent[inst_id]:
            del self._sent[inst_id]

    def unreported(self, instance: Instance) -> tuple[int, int]:
        """Returns (blocks, requests) sent to the instance since its report."""
        recent = [
            sent.num_blocks
            for sent in self._sent.get(instance.inst_id, {}).values()
            if sent.at_s >= instance.reported_at_s
        ]
        return sum(recent), len(recent)


def serving(instances: Iterable[Instance], model: str) -> list[Instance]:
    """Filters by readiness and model."""
    return [
        instance
        for instance in instances
        if instance.model == model and not instance.draining and instance.age_s <= MAX_AGE_S
    ]


def pick(
    instances: Sequence[Instance],
    num_tokens: int,
    dispatched: Dispatched,
    preferred: InstId | None = None,
    is_pooling: bool = True,
) -> Instance | None:
    """Returns the best of `instances` for a sequence of `num_tokens` (prompt and output) or None.

    First come instances whose own memory has room for the whole sequence; the others would borrow
    or, where the cluster is full now, queue it. Where memory is pooled, those come before them all
    where nobody waits: free memory is of no use beside a full batch, but to lend it. Of those with
    room `preferred` comes first: it has the prompt computed. Ties go to the smaller batch, then the
    smaller id.
    """

    def rank(instance: Instance) -> tuple[bool, bool, bool, float, int, int]:
        num_free = headroom(instance, dispatched)
        batch = instance.batch + dispatched.unreported(instance)[1]
        must_borrow = instance.blocks_for(num_tokens) > num_free
        is_other = instance.inst_id != preferred
        must_wait = is_pooling and is_other and instance.num_waiting > 0
        score = _score(instance, num_free, batch)
        return must_wait, must_borrow, is_other, -score, batch, instance.inst_id

    candidates = [instance for instance in instances if num_tokens <= instance.max_model_len]
    return min(candidates, key=rank, default=None)


def headroom(instance: Instance, dispatched: Dispatched) -> int:
    """Free blocks that nobody there waits for."""
    num_sent, _ = dispatched.unreported(instance)
    return max(0, instance.free_blocks - instance.waiting_blocks - num_sent)


def _score(instance: Instance, num_free: int, batch: int) -> float:
    # The share of memory that is free times the share of a step that the request would get.
    return num_free / max(1, instance.num_blocks) / (1 + batch)
