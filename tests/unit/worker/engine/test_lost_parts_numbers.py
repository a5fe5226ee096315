"""With a real model and real kernels: an answer that loses parts says the same numbers.

The creditors are memory of this process; the moves and losses come at given steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from kernels.interface import Kernels
from kernels.partial import AttentionPartial, PagedRows
from services.common.errors import PartLost
from services.common.ids import Incarnation, InstId, MoveId, ReqId
from services.common.sampling import SamplingParams
from services.worker.config import Config
from services.worker.core import Core, build_core, build_runner, build_scheduler
from services.worker.distattention.debtor import Peer, RemotePart
from services.worker.engine.attention import ChannelPool
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.runner import Runner
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import MoveOrder, Request
from services.worker.kvcache.block_table import RemoteSpan
from tests.unit.benchmarks.tiny_model import save_tiny_model

BLOCK = 16
CONFIG = Config(
    inst_id=0,
    model="tiny",
    num_blocks=32,
    max_batched_tokens=40,
    poison_freed_blocks=True,
)
PROMPT = tuple(7 * index % 59 + 1 for index in range(150))
SAMPLING = SamplingParams(logprobs=1, prompt_logprobs=0)
NUM_NEW = 20
FIRST, SECOND = InstId(2), InstId(3)


class PretendCreditor:
    """One creditor's memory, and the channel to it."""

    def __init__(self, kernels: Kernels, pool: torch.Tensor) -> None:
        self._kernels = kernels
        self._pool = torch.full_like(pool, torch.nan)
        self._blocks: dict[MoveId, list[int]] = {}
        self._num_used = 0
        self.is_lost = False

    def store(self, move_id: MoveId, blocks: torch.Tensor) -> None:
        first, self._num_used = self._num_used, self._num_used + len(blocks)
        self._pool[first : self._num_used] = blocks
        self._blocks[move_id] = list(range(first, self._num_used))

    def begin_step(self, parts: Sequence[RemotePart]) -> None:
        if self.is_lost:
            raise PartLost(FIRST, "gone")
        held = [[b for m in part.move_ids for b in self._blocks[m]] for part in parts]
        self._rows = PagedRows.build(
            [part.num_rows for part in parts],
            held,
            [len(blocks) * BLOCK for blocks in held],
            causal=False,
            num_blocks=len(self._pool),
            block_size=BLOCK,
        )

    def wired(self, row_ids: torch.Tensor) -> None:
        """There is no socket to it."""

    def send_query(self, layer: int, q: torch.Tensor) -> None:
        self._partial = AttentionPartial.allocate(*q.shape)
        self._kernels.micro_attention(q.contiguous(), self._pool, layer, self._rows, self._partial)

    def receive_partial(self, layer: int) -> AttentionPartial:
        return self._partial

    def close(self) -> None:
        pass


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)


class Engine:
    """Scheduler and runner in lock step; a step in which a creditor fails is only recorded so."""

    def __init__(self, core: Core) -> None:
        self.scheduler: Scheduler = build_scheduler(CONFIG, core)
        self._core = core
        self.creditors: dict[InstId, PretendCreditor] = {}
        self._channels = ChannelPool(lambda peer: self.creditors[peer.inst_id])  # type: ignore[arg-type,return-value]
        self._runner: Runner = build_runner(CONFIG, core, self._channels)
        self._num_moves = 0
        self.answer = Answer()

    def step(self) -> None:
        plan = self.scheduler.schedule(0.0, MemoryElsewhere())
        try:
            sampled = self._runner.run(plan)
        except PartLost as error:
            self._channels.drop(error.inst_id, error.incarnation)
            self.scheduler.placement.lose_parts(error.inst_id, incarnation=error.incarnation)
            return
        for output in self.scheduler.postprocess(plan, sampled, 0.0):
            assert output.error is None
            self.answer.token_ids += output.token_ids
            self.answer.logprobs += [one.chosen for one in output.logprobs]
            self.answer.prompt_logprobs += [one.chosen for one in output.prompt_logprobs]

    def lend(self, inst_id: InstId, num_blocks: int) -> None:
        order = self.scheduler.placement.begin_move(ReqId(1), num_blocks)
        assert order is not None
        self.commit(order, inst_id)

    def commit(self, order: MoveOrder, inst_id: InstId) -> None:
        pool = self._core.storage.pool
        creditor = self.creditors.setdefault(inst_id, PretendCreditor(self._core.kernels, pool))
        self._num_moves += 1
        incarnation, move_id = Incarnation(1), MoveId(self._num_moves)
        span = RemoteSpan(ReqId(1), inst_id, incarnation, move_id, len(order.block_ids))
        creditor.store(move_id, pool[list(order.block_ids)])
        self._channels.learn(Peer(inst_id, incarnation, ""))
        assert self.scheduler.placement.commit_move(order, span)
        self.scheduler.placement.end_move(order, was_refused=False, now_s=0.0)

    def lose(self, inst_id: InstId) -> None:
        self.creditors[inst_id].is_lost = True
        self.scheduler.placement.lose_parts(inst_id)

    def finish(self) -> Answer:
        while self.scheduler.running:
            self.step()
        return self.answer


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    before = torch.get_num_threads()
    yield build_core(CONFIG, save_tiny_model(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(before)


@pytest.fixture
def engine(core: Core) -> Iterator[Engine]:
    """In the middle of an answer, nothing of it in any cache but its own."""
    engine = begin(core)
    yield engine
    assert core.pool.num_free == CONFIG.num_blocks


def begin(core: Core) -> Engine:
    core.pool.free(core.pool.try_allocate(CONFIG.num_blocks) or [])
    engine = Engine(core)
    request = Request(ReqId(1), PROMPT, NUM_NEW, SAMPLING)
    engine.scheduler.add(request, 0.0)
    while len(engine.answer.token_ids) < 4:
        engine.step()
    return engine


@pytest.fixture(scope="module")
def whole(core: Core) -> Answer:
    return begin(core).finish()


def forget_cached(core: Core) -> None:
    core.pool.free(core.pool.try_allocate(core.pool.num_free) or [])


def assert_same(answer: Answer, whole: Answer) -> None:
    assert answer.token_ids == whole.token_ids
    assert answer.logprobs == pytest.approx(whole.logprobs, abs=1e-5)
    assert answer.prompt_logprobs == pytest.approx(whole.prompt_logprobs, abs=1e-5)


def test_parts_between_others_are_lost(engine: Engine, core: Core, whole: Answer) -> None:
    for inst_id in (FIRST, SECOND, FIRST, SECOND):
        engine.lend(inst_id, 2)
    forget_cached(core)
    engine.step()
    engine.lose(SECOND)
    assert_same(engine.finish(), whole)
    assert engine.scheduler.num_recomputed_tokens == 4 * BLOCK


def test_the_beginning_is_lost_and_then_the_rest(engine: Engine, core: Core, whole: Answer) -> None:
    """The second loss comes while the first hole is half full, and both are lent again."""
    engine.lend(FIRST, 4)
    engine.lend(SECOND, 4)
    forget_cached(core)
    engine.lose(FIRST)
    engine.step()
    engine.lend(SECOND, 2)
    forget_cached(core)
    engine.lose(SECOND)
    assert_same(engine.finish(), whole)
    assert engine.scheduler.num_recomputed_tokens <= 10 * BLOCK


def test_a_creditor_fails_in_the_middle_of_a_step(
    engine: Engine, core: Core, whole: Answer
) -> None:
    engine.lend(SECOND, 3)
    engine.lend(FIRST, 3)
    forget_cached(core)
    engine.creditors[FIRST].is_lost = True
    engine.step()
    assert_same(engine.finish(), whole)
    assert engine.scheduler.num_recomputed_tokens == 3 * BLOCK


def test_a_loss_while_the_prompt_is_computed_keeps_its_log_probabilities(
    core: Core, whole: Answer
) -> None:
    core.pool.free(core.pool.try_allocate(CONFIG.num_blocks) or [])
    engine = Engine(core)
    engine.scheduler.add(Request(ReqId(1), PROMPT, NUM_NEW, SAMPLING), 0.0)
    engine.step()
    engine.step()
    engine.lend(FIRST, 3)
    forget_cached(core)
    engine.step()
    engine.lose(FIRST)
    assert_same(engine.finish(), whole)
    assert engine.scheduler.num_recomputed_tokens == 3 * BLOCK
