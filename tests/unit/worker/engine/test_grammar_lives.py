"""Grammars on a real scheduler and model: through preemptions, resumption, and to clear ends."""

from collections.abc import Iterator
from dataclasses import replace
from typing import NoReturn

import pytest
import torch

from services.common.errors import InvalidRequest
from services.common.ids import ReqId
from services.common.sampling import SamplingParams
from services.worker.config import Config
from services.worker.core import Core, build_core, build_runner, build_scheduler
from services.worker.engine.attention import ChannelPool
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.sampling.grammar import Grammar
from services.worker.engine.sequence import FinishReason, Request, SequenceOutput
from tests.unit.benchmarks.tiny_model import save_tiny_model
from tests.unit.grammars import VOCABULARY, compiler, regex, token_id

#: The model's end; the tokenizer's bytes come in order, so that its letters are the model's, too.
EOS = 0
CONFIG = Config(inst_id=0, model="tiny", num_blocks=4, max_batched_tokens=16, prefix_caching=False)
SEEDED = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.1)
COMPILER = compiler(EOS)
TEXT = "[A-M]{20}[0-9]{20}"


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    before = torch.get_num_threads()
    yield build_core(CONFIG, save_tiny_model(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(before)


def request_of(req_id: int, text: str | None = TEXT, output: tuple[int, ...] = ()) -> Request:
    grammar = Grammar(COMPILER.compile(regex(text)), frozenset({EOS})) if text else None
    request = Request(ReqId(req_id), (5, 6, 7, 8), 60, SEEDED, frozenset({EOS}))
    return replace(request, grammar=grammar, output_token_ids=output, arrived_at_s=float(req_id))


def run(core: Core, *requests: Request) -> tuple[dict[int, list[SequenceOutput]], int]:
    """What each got, and how often one was preempted."""
    scheduler = build_scheduler(CONFIG, core)
    runner = build_runner(CONFIG, core, ChannelPool(_no_channel))
    for request in requests:
        scheduler.add(request, 0.0)
    outputs: dict[int, list[SequenceOutput]] = {request.req_id: [] for request in requests}
    num_preempted, now_s = 0, 0.0
    while scheduler.running or scheduler.waiting:
        now_s += 1.0
        plan = scheduler.schedule(now_s, MemoryElsewhere())
        num_preempted += plan.num_preempted
        for output in scheduler.postprocess(plan, runner.run(plan), now_s):
            outputs[output.req_id].append(output)
    assert core.pool.num_free == CONFIG.num_blocks
    return outputs, num_preempted


def _no_channel(peer: object) -> NoReturn:
    raise AssertionError("nobody lends here")


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def test_a_preempted_sequence_goes_on_where_it_was(core: Core) -> None:
    alone = [tokens_of(run(core, request_of(req_id))[0][req_id]) for req_id in (1, 2)]
    outputs, num_preempted = run(core, request_of(1), request_of(2))
    assert num_preempted > 0
    assert [tokens_of(outputs[req_id]) for req_id in (1, 2)] == alone
    assert [outputs[req_id][-1].finish_reason for req_id in (1, 2)] == [FinishReason.STOP] * 2
    text = VOCABULARY.decode(alone[0])
    assert (len(text), text[:20].isalpha(), text[20:].isdigit()) == (40, True, True)


def test_a_resumed_sequence_brings_the_rest(core: Core) -> None:
    whole = tokens_of(run(core, request_of(1))[0][1])
    for cut in (1, 20, 39, 40):
        rest = run(core, request_of(1, output=tuple(whole[:cut])))[0][1]
        assert tokens_of(rest) == whole[cut:]


def test_a_failing_grammar_ends_its_request_and_no_other(core: Core) -> None:
    wrong = request_of(2, output=(token_id("9"),))
    outputs, _ = run(core, request_of(1), wrong, request_of(3, None))
    assert isinstance(outputs[2][-1].error, InvalidRequest)
    assert outputs[1][-1].finish_reason is FinishReason.STOP
    assert outputs[3][-1].finish_reason is not None
