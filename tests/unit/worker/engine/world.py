"""A scheduler whose creditors are only counters: whole lives play out in milliseconds."""

from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.worker.engine.limits import SchedulerConfig
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder, Request, Schedule, SequenceOutput
from services.worker.engine.sequence_blocks import SequenceBlocks
from services.worker.kvcache.block_pool import BlockPool
from services.worker.kvcache.block_table import RemoteSpan
from tests.unit.worker.engine.pretend_kv import PretendKv

BLOCK = 4
CREDITOR, ANOTHER = 2, 3


def request(req_id: int, num_prompt: int = 4, max_tokens: int = 4) -> Request:
    return Request(ReqId(req_id), tuple(range(1, num_prompt + 1)), max_tokens)


class World:
    """One instance, `remote_blocks` blocks elsewhere, a clock that advances by one a step."""

    def __init__(
        self,
        num_blocks: int = 8,
        remote_blocks: int = 0,
        budget: int = 16,
        max_running: int = 8,
        is_caching: bool = False,
        keep_remote_s: float = 0.0,
    ) -> None:
        self.kv = PretendKv(num_blocks, BLOCK)
        self.pool = BlockPool(num_blocks, self.kv.poison)
        config = SchedulerConfig(BLOCK, budget, max_running, max_waiting=32)
        self.scheduler = Scheduler(config, SequenceBlocks(self.pool, keep_remote_s, is_caching))
        self.remote_blocks = remote_blocks
        self.lent: dict[MoveId, int] = {}
        self.lent_to_others: list[int] = []
        self.reserved: list[int] = []
        """Blocks that a part on its way back will fill."""
        self.orders: list[MoveOrder] = []
        self.outputs: list[SequenceOutput] = []
        self.now_s = 0.0
        self._next_move = 1

    @property
    def remote_free(self) -> int:
        return self.remote_blocks - sum(self.lent.values())

    def add(self, req_id: int, num_prompt: int = 4, max_tokens: int = 4) -> None:
        self.scheduler.add(request(req_id, num_prompt, max_tokens), self.now_s)

    def step(self, token: int = 7) -> Schedule:
        """Schedule, pretend to run (every sampled token is `token`), postprocess, settle."""
        plan = self._schedule()
        self.kv.run(plan)
        sampled = {item.sequence.req_id: token for item in plan.items if item.samples}
        outputs = self.scheduler.postprocess(plan, sampled, self.now_s)
        self.outputs += outputs
        self.settle()
        self.now_s += 1.0
        return plan

    def fail_step(self, inst_id: int = CREDITOR) -> None:
        """A step in which that creditor is found to be lost: nothing of it is recorded."""
        self._schedule()
        self.lose(inst_id)
        self.now_s += 1.0

    def _schedule(self) -> Schedule:
        plan = self.scheduler.schedule(
            self.now_s,
            MemoryElsewhere(self.remote_free, self.remote_blocks, len(self.lent_to_others)),
        )
        self.settle()
        self.check(plan)
        self.outputs += plan.failed
        self.orders += plan.moves
        return plan

    def lose(self, inst_id: int = CREDITOR) -> int:
        num_hurt = self.scheduler.placement.lose_parts(InstId(inst_id))
        self.settle()
        return num_hurt

    def settle(self) -> None:
        for span in self.scheduler.blocks.take_released():
            del self.lent[span.move_id]

    def lend_to_others(self, num_blocks: int) -> None:
        """What this instance's own creditor side has done."""
        blocks = self.pool.try_allocate(num_blocks)
        assert blocks is not None
        self.lent_to_others += blocks

    def others_give_back(self) -> None:
        self.pool.free(self.lent_to_others)
        self.lent_to_others = []

    def new_span(self, req_id: ReqId, num_blocks: int, inst_id: int = CREDITOR) -> RemoteSpan:
        """What a creditor grants."""
        move_id = MoveId(self._next_move)
        self._next_move += 1
        self.lent[move_id] = num_blocks
        return RemoteSpan(req_id, InstId(inst_id), Incarnation(1), move_id, num_blocks)

    def make_room(self, span: RemoteSpan) -> list[int] | None:
        """The first half of taking a part back; `take_back` is the second, some steps later."""
        blocks = self.scheduler.placement.make_room(span, None, self.now_s)
        self.reserved += blocks or []
        return blocks

    def take_back(self, span: RemoteSpan, blocks: list[int]) -> bool:
        self.reserved = [block for block in self.reserved if block not in blocks]
        self.kv.take_back(span, blocks)
        is_committed = self.scheduler.placement.take_back(span, blocks)
        if not is_committed:
            self.pool.free(blocks)
        self.settle()
        return is_committed

    def lend_on(self, span: RemoteSpan, num_first: int | None = None) -> bool:
        """To one creditor, or the first blocks of it to one and the rest to another one."""
        sizes = [num_first, span.num_blocks - num_first] if num_first else [span.num_blocks]
        insts = (CREDITOR, ANOTHER)
        by = [self.new_span(span.req_id, n, i) for n, i in zip(sizes, insts, strict=False)]
        self.kv.lend_on(span, by)
        is_committed = self.scheduler.placement.lend_on(span, by)
        if not is_committed:
            for part in by:
                del self.lent[part.move_id]
        self.settle()
        return is_committed

    def carry_out(
        self, order: MoveOrder, granted: int | None = None, inst_id: int = CREDITOR
    ) -> bool:
        """What the mover does: reserve, copy, commit at a step boundary."""
        count = min(len(order.block_ids), self.remote_free if granted is None else granted)
        is_committed = False
        if count > 0:
            span = self.new_span(order.req_id, count, inst_id)
            self.kv.commit(span, self.kv.copy_out(order.block_ids[:count]))
            is_committed = self.scheduler.placement.commit_move(order, span)
            if not is_committed:
                del self.lent[span.move_id]
        self.scheduler.placement.end_move(order, count == 0, self.now_s)
        return is_committed

    def carry_out_all(self) -> None:
        while self.orders:
            self.carry_out(self.orders.pop(0))

    def run(self, max_steps: int = 400) -> None:
        """Until nothing is left; moves are carried out between steps."""
        for _ in range(max_steps):
            self.step()
            self.carry_out_all()
            if not self.scheduler.running and not self.scheduler.waiting:
                return
        raise AssertionError(f"still running after {max_steps} steps")

    def check(self, plan: Schedule) -> None:
        """No block lost or owned twice; nothing over budget; every scheduled token has its slot."""
        tables = [seq.table for seq in self.scheduler.running]
        local = {block for table in tables for block in table.local}
        others = [*self.lent_to_others, *self.reserved]
        assert len(local) + len(others) + self.pool.num_free == self.pool.num_blocks
        assert local.isdisjoint(others)
        self.pool.check_integrity()
        spans = {span.move_id: span for table in tables for span in table.remote}
        kept = {span.move_id for span in self.scheduler.blocks.remote_spans}
        assert spans.keys() <= kept == self.lent.keys()
        self.check_writers(plan)
        assert plan.num_tokens <= self.scheduler.config.max_batched_tokens
        assert len(self.scheduler.running) <= self.scheduler.config.max_running
        assert all(not seq.table.num_blocks for seq in self.scheduler.waiting)
        for item in plan.items:
            assert item.end <= item.sequence.num_tokens
            for position in range(item.start, item.end):
                item.sequence.table.slot(position)
        for sequence in self.scheduler.running:
            assert all(hole.stop <= sequence.num_computed for hole in sequence.holes)
            assert all(hole.stop % BLOCK == 0 for hole in sequence.holes)

    def check_writers(self, plan: Schedule) -> None:
        """A block that is written to in this step belongs to one sequence alone."""
        written = [
            block
            for item in plan.items
            for block in {
                item.sequence.table.slot(position) // BLOCK
                for position in range(item.start, item.end)
            }
        ]
        assert len(set(written)) == len(written)
        held = [block for seq in self.scheduler.running for block in seq.table.local]
        assert all(held.count(block) == 1 for block in written)

    def tokens_of(self, req_id: int) -> int:
        return sum(len(o.token_ids) for o in self.outputs if o.req_id == req_id)
