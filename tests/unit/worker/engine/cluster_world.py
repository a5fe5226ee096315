"""Some schedulers that share their memory, without threads, sockets or waiting.

Scheduler, pool, ledger and view of the peers are the real ones; this world carries their wishes
from one to another as the rManagers do, late and in an order that a seed draws.
"""

from collections.abc import Callable
from random import Random

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder, Request, SequenceOutput
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.block_table import RemoteSpan
from services.worker.kvcache.lending import Grant, LendingLedger, Owner
from services.worker.rank import Rank
from services.worker.rmanager.peers import Peers, PeerView

BLOCK = 4
TICK_S = 0.25
_NEVER_S = 1e9
_RECALL_PERIOD_S = 0.5


class Node:
    """One instance."""

    def __init__(self, inst_id: int, num_blocks: int, config: SchedulerConfig) -> None:
        self.inst_id = InstId(inst_id)
        self.owner = Owner(self.inst_id, Incarnation(1))
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(config, SequenceBlocks(self.pool, 0.0, is_caching=False))
        self.ledger = LendingLedger(self.pool, 1, _NEVER_S, hold_off_s=5.0)
        self.peers = Peers("m", 1, keep_free=1)
        self.recalls_not_before_s = 0.0
        self.retrieving: set[MoveId] = set()

    @property
    def view(self) -> PeerView:
        num_blocks, num_free = self.pool.num_blocks, self.pool.num_free
        return PeerView(
            self.inst_id, Incarnation(1), "", "", BLOCK, 1, "m", num_blocks, num_free
        )  # fmt: skip


class ClusterWorld:
    """Every tick each node makes a step, and some of the messages on their way arrive."""

    def __init__(self, seed: int, sizes: list[int], stall_timeout_s: float = _NEVER_S) -> None:
        """By default no time-out helps anybody."""
        config = SchedulerConfig(
            BLOCK, max_batched_tokens=16, max_running=6, max_move_blocks=4,
            stall_timeout_s=stall_timeout_s, queue_timeout_s=_NEVER_S, patience_s=4.0,
        )  # fmt: skip
        self.random = Random(seed)
        self.nodes = [Node(number, size, config) for number, size in enumerate(sizes, start=1)]
        self.outputs: list[SequenceOutput] = []
        self.now_s = 0.0
        self.progress_s: dict[Rank, float] = {}
        """When each request that has not ended was last given a token to compute."""
        self.num_preempted = 0
        self.gave_way_late: set[Rank] = set()
        """Who may have lost blocks, in this tick, to a recall for an older one that has ended."""
        self._under_way: list[Callable[[], None]] = []
        self._num_moves = 0
        self._meet()

    @property
    def max_blocks(self) -> int:
        """That one request may have."""
        return sum(node.pool.num_blocks for node in self.nodes) - (len(self.nodes) - 1)

    def add(self, node: Node, request: Request) -> None:
        node.scheduler.add(request, self.now_s)
        self.progress_s[request.rank] = self.now_s

    def tick(self) -> None:
        self.gave_way_late.clear()
        for node in self.random.sample(self.nodes, len(self.nodes)):
            self._step(node)
            self._deliver(0.7)
        if self.random.random() < 0.5:
            self._meet()
        self.now_s += TICK_S

    def settle(self) -> None:
        """Whatever is on its way arrives."""
        while self._under_way:
            self._deliver(1.0)

    def check(self) -> None:
        for node in self.nodes:
            node.pool.check_integrity()
            local = sum(len(seq.table.local) for seq in node.scheduler.running)
            held = local + node.ledger.num_lent_blocks + node.pool.num_free
            assert held == node.pool.num_blocks or self._under_way

    def _meet(self) -> None:
        """Views are as old as this."""
        for node in self.nodes:
            node.peers.update(other.view for other in self.nodes if other is not node)

    def _deliver(self, share: float) -> None:
        """Some messages, in any order; what they cause is on its way for a while, too."""
        self.random.shuffle(self._under_way)
        under_way, self._under_way = self._under_way, []
        for message in under_way:
            if self.random.random() < share:
                message()
            else:
                self._under_way.append(message)

    # -- steps ------------------------------------------------------------------------------------

    def _step(self, node: Node) -> None:
        scheduler = node.scheduler
        elsewhere = MemoryElsewhere(
            node.peers.free_blocks,
            node.peers.total_blocks,
            node.ledger.num_recallable_blocks(self.now_s),
            node.ledger.oldest_borrower(),
        )
        plan = scheduler.schedule(self.now_s, elsewhere)
        self.num_preempted += plan.num_preempted
        for item in plan.items:
            self.progress_s[item.sequence.rank] = self.now_s
        ranks = {item.sequence.req_id: item.sequence.rank for item in plan.items}
        sampled = {item.sequence.req_id: 7 for item in plan.items if item.samples}
        outputs = plan.failed + scheduler.postprocess(plan, sampled, self.now_s)
        for output in outputs:
            if output.is_last and output.error is None:
                del self.progress_s[ranks[output.req_id]]
        self.outputs += outputs
        self._release(node)
        for order in plan.moves:
            self._under_way.append(lambda order=order: self._move(node, order))  # type: ignore[misc]
        if plan.recall_claimant is not None:
            self._recall(node, plan.num_recalled_blocks, plan.recall_claimant)

    def _release(self, node: Node) -> None:
        for span in node.scheduler.blocks.take_released():
            creditor = self._node(span.inst_id)
            self._under_way.append(
                lambda c=creditor, s=span: c.ledger.release(node.owner, s.move_id)  # type: ignore[misc]
            )

    def _node(self, inst_id: InstId) -> Node:
        return self.nodes[inst_id - 1]

    # -- moves: what mover and creditor side do ---------------------------------------------------

    def _move(self, node: Node, order: MoveOrder) -> None:
        placement, moved = node.scheduler.placement, 0
        creditors = node.peers.everyone if order.claimant else node.peers.best_creditors()
        for view in creditors:
            if moved == len(order.block_ids) or not placement.is_current(order):
                break
            if order.claimant:
                moved = self._claim(node, view, order)
            else:
                rest = len(order.block_ids) - moved
                moved += self._move_to(node, view, order, min(rest, node.peers.lendable(view)))
            if moved and order.claimant:
                break
        placement.end_move(order, moved == 0, self.now_s)

    def _claim(self, node: Node, view: PeerView, order: MoveOrder) -> int:
        return self._move_to(node, view, order, len(order.block_ids)) or self._move_to(
            node, view, order, min(len(order.block_ids), node.peers.room_on(view.inst_id))
        )

    def _move_to(self, node: Node, view: PeerView, order: MoveOrder, num_blocks: int) -> int:
        creditor = self._node(view.inst_id)
        grant = self._reserve(node, creditor, order.rank, num_blocks)
        if grant is None and order.claimant is not None:
            sacrifice = creditor.ledger.sacrifice_for(order.claimant, num_blocks, self.now_s)
            if sacrifice.num_recalled:
                self._recall(creditor, sacrifice.num_recalled, order.claimant)
            creditor.scheduler.placement.give_way(order.claimant, sacrifice.num_free, self.now_s)
            self._release(creditor)
            grant = self._reserve(node, creditor, order.rank, num_blocks)
        node.peers.learn_free(creditor.inst_id, creditor.pool.num_free)
        if grant is None:
            return 0
        span = self._span(creditor, grant)
        if not node.scheduler.placement.commit_move(order, span):
            creditor.ledger.release(node.owner, grant.move_id)
            return 0
        return num_blocks

    def _reserve(self, node: Node, creditor: Node, rank: Rank, num_blocks: int) -> Grant | None:
        self._num_moves += 1
        move_id = MoveId(self._num_moves)
        grant = creditor.ledger.reserve(node.owner, rank, move_id, num_blocks, self.now_s)
        for index in range(num_blocks if grant else 0):
            creditor.ledger.begin_receive(node.owner, move_id, index, self.now_s)
            creditor.ledger.end_receive(move_id, index, True)
        return grant

    def _span(self, creditor: Node, grant: Grant) -> RemoteSpan:
        return RemoteSpan(
            ReqId(grant.req_id), creditor.inst_id, Incarnation(1), grant.move_id,
            len(grant.block_ids),
        )  # fmt: skip

    # -- recalls: what recaller and retriever do --------------------------------------------------

    def _recall(self, creditor: Node, num_blocks: int, claimant: Rank) -> None:
        if self.now_s < creditor.recalls_not_before_s:
            return
        creditor.recalls_not_before_s = self.now_s + _RECALL_PERIOD_S
        for grant in creditor.ledger.recall(num_blocks, self.now_s, claimant):
            owner = self._node(grant.owner.inst_id)
            self._under_way.append(
                lambda g=grant, o=owner: self._retrieve(o, creditor, g.move_id, claimant)  # type: ignore[misc]
            )

    def _retrieve(self, node: Node, creditor: Node, move_id: MoveId, claimant: Rank) -> None:
        spans = node.scheduler.blocks.recalled((creditor.inst_id, Incarnation(1)), {move_id})
        self._release(node)
        for span in spans:
            if span.move_id not in node.retrieving and not self._lend_on(node, span):
                self._take_back(node, span, claimant)

    def _lend_on(self, node: Node, span: RemoteSpan) -> bool:
        rank = node.scheduler.placement.rank_of(span)
        assert rank is not None
        for view in node.peers.best_creditors():
            creditor = self._node(view.inst_id)
            if view.inst_id == span.inst_id or node.peers.lendable(view) < span.num_blocks:
                continue
            grant = self._reserve(node, creditor, rank, span.num_blocks)
            if grant is not None:
                by = self._span(creditor, grant)
                assert node.scheduler.placement.lend_on(span, [by])
                self._release(node)
                return True
        return False

    def _take_back(self, node: Node, span: RemoteSpan, claimant: Rank) -> None:
        rank = node.scheduler.placement.rank_of(span)
        if rank is not None and claimant not in self.progress_s:
            self.gave_way_late.add(rank)
        block_ids = node.scheduler.placement.make_room(span, claimant, self.now_s)
        self._release(node)
        if block_ids is None:
            return
        node.retrieving.add(span.move_id)
        self._under_way.append(lambda: self._commit_taken_back(node, span, block_ids))

    def _commit_taken_back(self, node: Node, span: RemoteSpan, block_ids: list[int]) -> None:
        node.retrieving.discard(span.move_id)
        if not node.scheduler.placement.take_back(span, block_ids):
            node.pool.free(block_ids)
        self._release(node)
