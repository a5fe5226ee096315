import tracemalloc
from collections.abc import Sequence
from itertools import accumulate

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import PagedRows, StepKv
from services.common.ids import ReqId
from services.worker.engine.attention import ChannelPool, RemoteAttention
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.runner import Runner
from services.worker.engine.sequence import Schedule
from services.worker.engine.step_tensors import KeptTables, StepTensors
from services.worker.models.llama import PackedTokens
from tests.unit.worker.engine.world import ANOTHER, BLOCK, CREDITOR, World

MAX_RUNNING = 8


def new_tensors(num_blocks: int, budget: int) -> StepTensors:
    pool = torch.empty(num_blocks, 1, 2, 1, BLOCK, 1)
    return StepTensors(pool, budget, MAX_RUNNING)


class WatchedWorld(World):
    """Every step's tensors are compared with what is made of the plan alone."""

    def __init__(self, num_blocks: int, remote_blocks: int, budget: int, is_caching: bool) -> None:
        super().__init__(num_blocks, remote_blocks, budget, MAX_RUNNING, is_caching)
        self._tensors = new_tensors(num_blocks, budget)

    def check(self, plan: Schedule) -> None:
        super().check(plan)
        contexts = [item.sequence.table.context(item.end) for item in plan.items]
        wanted = [plan.num_tokens - 1] if plan.items else []
        tokens, kv = self._tensors.fill(plan.items, contexts, wanted)
        positions = [(i.sequence, at) for i in plan.items for at in range(i.start, i.end)]
        assert tokens.token_ids.tolist() == [seq.token_ids[at] for seq, at in positions]
        assert tokens.positions.tolist() == [at for _, at in positions]
        assert tokens.logits_rows.tolist() == wanted
        assert kv.slots.tolist() == [seq.table.slot(at) for seq, at in positions]
        rows = kv.rows
        assert rows.row_start.tolist() == [0, *accumulate(i.num_tokens for i in plan.items)]
        lengths = [i.end - c.num_remote_tokens for i, c in zip(plan.items, contexts, strict=True)]
        assert rows.kv_len.tolist() == lengths
        assert_tables(rows, [context.local for context in contexts])
        rows.validate(self.pool.num_blocks, BLOCK)


def assert_tables(rows: PagedRows, tables: Sequence[Sequence[int]]) -> None:
    starts = rows.table_start.tolist()
    ids = rows.block_ids.tolist()
    assert len(starts) == len(tables) + 1
    for start, stop, table in zip(starts, starts[1:], tables, strict=False):
        assert ids[start : start + len(table)] == list(table)
        assert start + len(table) <= stop


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 40)),
        st.tuples(st.just("abort"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("lose"), st.sampled_from([CREDITOR, ANOTHER]), st.just(0)),
        st.tuples(st.just("lend"), st.integers(1, 9), st.integers(1, 4)),
        st.tuples(st.just("return"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("step"), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=60)
@given(
    num_blocks=st.integers(4, 24),
    budget=st.integers(1, 24),
    is_caching=st.booleans(),
    events=EVENTS,
)
def test_what_is_kept_equals_what_is_made_anew(
    num_blocks: int, budget: int, is_caching: bool, events: list[tuple[str, int, int]]
) -> None:
    world = WatchedWorld(num_blocks, 16, budget, is_caching)
    num_added = 0
    for kind, first, second in events:
        if kind == "add":
            num_added += 1
            world.add(num_added, first, second)
        elif kind == "abort":
            world.scheduler.abort(ReqId(first), world.now_s)
        elif kind == "lose":
            world.lose(first)
        elif kind == "lend":
            order = world.scheduler.placement.begin_move(ReqId(first), second)
            world.orders += [order] if order else []
            world.carry_out_all()
        elif kind == "return" and (spans := world.scheduler.blocks.remote_spans):
            span = spans[first % len(spans)]
            blocks = world.make_room(span)
            if blocks is not None:
                world.take_back(span, blocks)
        world.settle()
        world.step()
    world.carry_out_all()
    world.run()


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["grow", "replace", "join", "leave"]),
            st.integers(0, 3),
            st.integers(0, 50),
        ),
        max_size=30,
    )
)
def test_tables_grow_change_come_and_go(events: list[tuple[str, int, int]]) -> None:
    kept, tables = KeptTables(max_seqs=4), list[list[int]]()
    for number, (kind, index, num_ids) in enumerate(events):
        ids = range(number * 100, number * 100 + num_ids)
        if kind == "join" and len(tables) < 4:
            tables.insert(index, list(ids))
        elif index < len(tables):
            if kind == "grow":
                tables[index].extend(ids)
            elif kind == "replace":
                tables[index] = list(ids)
            elif kind == "leave":
                del tables[index]
        kept.update(tables)
        for table, start in zip(tables, kept.starts.tolist(), strict=False):
            assert kept.ids[start : start + len(table)].tolist() == table
        assert kept.starts[len(tables)] == kept.num_ids <= len(kept.ids)


class FakeModel:
    """Says token 1 of every row; keeps what it gets, so that its memory cannot be had twice."""

    def __init__(self) -> None:
        self.steps: list[tuple[PackedTokens, StepKv]] = []
        self._logits = torch.zeros(MAX_RUNNING, 2)

    def forward(self, tokens: PackedTokens, kv: StepKv, elsewhere: object) -> torch.Tensor:
        self.steps.append((tokens, kv))
        return self._logits[: len(tokens.logits_rows)]

    def likeliest(self, logits: torch.Tensor) -> list[int]:
        return [1] * len(logits)


def test_a_thousand_decode_steps_take_no_new_memory_for_their_tensors() -> None:
    num_steps, batch = 1000, MAX_RUNNING
    blocks_each = -(-(2 * num_steps) // BLOCK)
    world = World(batch * blocks_each, budget=64)
    model = FakeModel()
    attention = RemoteAttention(None, ChannelPool(lambda peer: None))  # type: ignore[arg-type, return-value]
    runner = Runner(model, new_tensors(world.pool.num_blocks, 64), attention)  # type: ignore[arg-type]
    for req_id in range(1, batch + 1):
        world.add(req_id, 4, num_steps + 20)

    def step() -> None:
        plan = world.scheduler.schedule(0.0, MemoryElsewhere())
        sampled = runner.run(plan)
        world.outputs += world.scheduler.postprocess(plan, sampled, 0.0)

    for _ in range(10):
        step()
    model.steps.clear()
    tracemalloc.start()
    peaks_bytes = []
    for _ in range(num_steps):
        before_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        step()
        peaks_bytes.append(tracemalloc.get_traced_memory()[1] - before_bytes)
    tracemalloc.stop()
    assert len(model.steps) == num_steps
    for addresses in zip(*(addresses_of(*seen) for seen in model.steps), strict=True):
        assert len(set(addresses)) == 1
    # The lists of a step's numbers and its outputs; now and then room for sequences that grew.
    assert sorted(peaks_bytes)[num_steps * 9 // 10] < 8_192
    assert max(peaks_bytes) < 65_536


def addresses_of(tokens: PackedTokens, kv: StepKv) -> list[int]:
    rows = kv.rows
    tensors = (tokens.token_ids, tokens.positions, tokens.logits_rows, kv.slots, rows.row_start,
               rows.table_start, rows.kv_len)  # fmt: skip
    return [tensor.data_ptr() for tensor in tensors]
