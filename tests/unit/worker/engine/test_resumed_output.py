"""A sequence whose beginning another instance generated goes on as if nothing had happened."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import pytest
import torch

from services.common.ids import ReqId
from services.common.sampling import SamplingParams
from services.worker.config import Config
from services.worker.core import Core, build_core, build_runner, build_scheduler
from services.worker.engine.attention import ChannelPool
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.sampling.state import TokenLogprobs
from services.worker.engine.sequence import FinishReason, Request
from tests.unit.benchmarks.tiny_model import save_tiny_model

CONFIG = Config(inst_id=0, model="tiny", num_blocks=32, max_batched_tokens=16)
PROMPT = (5, 6, 7, 8, 9) * 4
NUM_NEW = 24

GREEDY = SamplingParams(logprobs=2)
SEEDED = SamplingParams(temperature=1.3, top_p=0.95, seed=77, logprobs=1)
#: With everything that looks back at the tokens so far.
LOOKING_BACK = replace(
    SEEDED,
    repetition_penalty=1.4,
    presence_penalty=0.7,
    frequency_penalty=0.3,
    logit_bias={3: 2.0},
    min_tokens=12,
)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    reason: FinishReason | None = None


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Core]:
    before = torch.get_num_threads()
    yield build_core(CONFIG, save_tiny_model(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(before)


def answer_to(core: Core, request: Request) -> Answer:
    """A fresh scheduler each time, on the same pool: nothing but the request is known."""
    scheduler = build_scheduler(CONFIG, core)
    runner = build_runner(CONFIG, core, ChannelPool(_no_channel))
    scheduler.add(request, 0.0)
    answer = Answer()
    while answer.reason is None:
        plan = scheduler.schedule(0.0, MemoryElsewhere())
        for output in scheduler.postprocess(plan, runner.run(plan), 0.0):
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.num_cached_tokens += output.num_cached_tokens
            answer.reason = output.finish_reason
    assert core.pool.num_free == CONFIG.num_blocks
    return answer


def _no_channel(peer: object) -> NoReturn:
    raise AssertionError("nobody lends here")


def request_of(sampling: SamplingParams, **fields: Any) -> Request:
    return replace(Request(ReqId(1), PROMPT, NUM_NEW, sampling), **fields)


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(GREEDY, id="greedy"),
        pytest.param(SEEDED, id="seeded"),
        pytest.param(LOOKING_BACK, id="penalties"),
    ],
)
def test_it_goes_on_with_the_token_that_would_have_come(
    core: Core, sampling: SamplingParams
) -> None:
    whole = answer_to(core, request_of(sampling))
    assert (len(whole.token_ids), whole.reason) == (NUM_NEW, FinishReason.LENGTH)
    for cut in (1, 7, 16, NUM_NEW - 1):
        # With a salt of its own, all of it is computed again.
        fields = {"output_token_ids": tuple(whole.token_ids[:cut]), "cache_salt": str(cut)}
        rest = answer_to(core, request_of(sampling, **fields))
        assert (rest.token_ids, rest.reason) == (whole.token_ids[cut:], whole.reason)
        assert [one.chosen for one in rest.logprobs] == pytest.approx(
            [one.chosen for one in whole.logprobs[cut:]], abs=1e-5
        )


def test_min_tokens_counts_what_was_generated_elsewhere(core: Core) -> None:
    """Every token ends the sequence as soon as one may."""
    sampling = replace(LOOKING_BACK, logprobs=None)
    free = answer_to(core, request_of(sampling)).token_ids
    ends = frozenset(set(range(61)) - set(free[: sampling.min_tokens]))
    whole = answer_to(core, request_of(sampling, stop_token_ids=ends))
    assert len(whole.token_ids) >= sampling.min_tokens
    for cut in (1, 11):
        output = tuple(whole.token_ids[:cut])
        rest = answer_to(core, request_of(sampling, stop_token_ids=ends, output_token_ids=output))
        assert (rest.token_ids, rest.reason) == (whole.token_ids[cut:], whole.reason)


def test_log_probabilities_of_the_prompt_are_there_if_they_are_asked_for(core: Core) -> None:
    sampling = replace(GREEDY, prompt_logprobs=0)
    whole = answer_to(core, request_of(sampling))
    output = tuple(whole.token_ids[:5])
    again = answer_to(core, request_of(sampling, output_token_ids=output))
    chosen = [one.chosen for one in whole.prompt_logprobs]
    assert len(chosen) == len(PROMPT) - 1
    assert [one.chosen for one in again.prompt_logprobs] == pytest.approx(chosen, abs=1e-5)
    assert answer_to(core, request_of(GREEDY, output_token_ids=output)).prompt_logprobs == []


def test_only_prompt_tokens_count_as_cached(core: Core) -> None:
    """A pool that has seen the whole answer knows more of the sequence than its prompt."""
    salted = {"cache_salt": "mine"}
    whole = answer_to(core, request_of(GREEDY, **salted))
    assert whole.num_cached_tokens == 0
    output = tuple(whole.token_ids[:20])
    rest = answer_to(core, request_of(GREEDY, output_token_ids=output, **salted))
    assert rest.num_cached_tokens == len(PROMPT)
    assert rest.token_ids == whole.token_ids[20:]
