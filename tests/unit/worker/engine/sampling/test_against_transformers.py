"""A real scheduler and runner on a tiny random Llama: tokens and log probabilities of transformers.

Prompts come in chunks, and one test takes the memory away in the middle.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.common.ids import ReqId
from services.common.sampling import SamplingParams
from services.worker.config import Config
from services.worker.core import Core, build_core, build_runner, build_scheduler
from services.worker.distattention.debtor import CreditorChannel, Peer
from services.worker.engine.attention import ChannelPool
from services.worker.engine.memory_elsewhere import MemoryElsewhere
from services.worker.engine.sampling.state import TokenLogprobs
from services.worker.engine.scheduler import Scheduler
from services.worker.engine.sequence import Request, SequenceOutput

EOS = 5
VOCAB = 97
NUM_NEW = 24
CHUNK = 16
CONFIG = Config(1, "tiny", num_blocks=32, block_size=16, max_batched_tokens=CHUNK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def core(folder: Path) -> Iterator[Core]:
    before = torch.get_num_threads()
    yield build_core(CONFIG, folder)
    torch.set_num_threads(before)


def prompt_of(num_tokens: int, seed: int = 1) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(6, VOCAB, (num_tokens,), generator=generator).tolist())


class Answers:
    """Drives the engine's parts step by step and gathers what each request got."""

    def __init__(self, core: Core) -> None:
        self.scheduler: Scheduler = build_scheduler(CONFIG, core)
        self._runner = build_runner(CONFIG, core, ChannelPool(_no_channel))
        self._outputs: dict[ReqId, list[SequenceOutput]] = {}
        self.num_steps = 0

    def add(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        ends: frozenset[int] = frozenset(),
        priority: int = 0,
    ) -> ReqId:
        req_id = ReqId(len(self._outputs) + 1)
        self._outputs[req_id] = []
        request = Request(req_id, prompt, NUM_NEW, sampling, ends, priority)
        self.scheduler.add(request, 0.0)
        return req_id

    def step(self) -> None:
        plan = self.scheduler.schedule(0.0, MemoryElsewhere())
        for output in self.scheduler.postprocess(plan, self._runner.run(plan), 0.0):
            self._outputs[output.req_id].append(output)
        self.num_steps += 1

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()

    def preempt(self, req_id: ReqId) -> None:
        """Take its blocks away, as a shortage would."""
        sequence = self.scheduler.find(req_id)
        assert sequence is not None
        self.scheduler.blocks.give_up(sequence, 0.0, keep_remote=False)
        self.scheduler.running.remove(sequence)
        self.scheduler.waiting.append(sequence)

    def tokens(self, req_id: ReqId) -> list[int]:
        return [token for output in self._outputs[req_id] for token in output.token_ids]

    def logprobs(self, req_id: ReqId) -> list[TokenLogprobs]:
        return [one for output in self._outputs[req_id] for one in output.logprobs]

    def prompt_logprobs(self, req_id: ReqId) -> list[TokenLogprobs]:
        return [one for output in self._outputs[req_id] for one in output.prompt_logprobs]

    def num_cached(self, req_id: ReqId) -> int:
        return sum(output.num_cached_tokens for output in self._outputs[req_id])


def _no_channel(peer: Peer) -> CreditorChannel:
    raise AssertionError("nothing is lent here")


def generate(oracle: Any, prompt: tuple[int, ...], **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("params", "options"),
    [
        pytest.param({}, {}, id="greedy"),
        pytest.param({"repetition_penalty": 1.4}, {"repetition_penalty": 1.4}, id="repetition"),
        pytest.param({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}, id="repeating"),
        pytest.param(
            {"logit_bias": {9: 6.0, 40: -50.0, EOS: 3.5}},
            {"sequence_bias": [[[9], 6.0], [[40], -50.0], [[EOS], 3.5]]},
            id="bias",
        ),
        pytest.param(
            {"min_tokens": 12, "logit_bias": {EOS: 100.0}},
            {"min_new_tokens": 12, "sequence_bias": [[[EOS], 100.0]]},
            id="minimum",
        ),
    ],
)
def test_tokens_are_those_of_transformers(
    core: Core, oracle: Any, params: dict[str, Any], options: dict[str, Any]
) -> None:
    """All prompts in one batch, beside one that samples."""
    answers = Answers(core)
    prompts = [prompt_of(3), prompt_of(11, seed=2), prompt_of(30, seed=3)]
    sampling = SamplingParams(**params)
    answers.add(prompt_of(7), SamplingParams(1.0, seed=3, top_p=0.9, frequency_penalty=0.5))
    req_ids = [answers.add(prompt, sampling, frozenset({EOS})) for prompt in prompts]
    answers.run()
    for req_id, prompt in zip(req_ids, prompts, strict=True):
        wanted = generate(oracle, prompt, eos_token_id=EOS, **options)
        # An end token ends the answer and is not part of it.
        assert answers.tokens(req_id) == [token for token in wanted if token not in (EOS, 0)]


@pytest.mark.parametrize("is_preempted", [False, True])
def test_log_probabilities_are_those_of_transformers(
    core: Core, oracle: Any, is_preempted: bool
) -> None:
    """Of a prompt in three chunks and of the answer; other requests share the steps."""
    answers = Answers(core)
    prompt = prompt_of(40)
    params = SamplingParams(0.8, seed=5, logprobs=3, prompt_logprobs=2)
    warm = answers.add(prompt, SamplingParams())
    answers.run()
    mine = answers.add(prompt, params)
    answers.add(prompt_of(9, seed=4), SamplingParams(1.0, seed=1, prompt_logprobs=0, logprobs=0))
    answers.step()
    for _ in range(2 if is_preempted else 0):
        answers.preempt(mine)
        for _ in range(6):
            answers.step()
    answers.run()
    tokens = answers.tokens(mine)
    with torch.inference_mode():
        logits = oracle(torch.tensor([[*prompt, *tokens]])).logits[0]
    wanted = logits.log_softmax(-1)
    check(answers.prompt_logprobs(mine), wanted[: len(prompt) - 1], list(prompt[1:]), 2)
    check(answers.logprobs(mine), wanted[len(prompt) - 1 : -1], tokens, 3)
    assert len(answers.tokens(warm)) == len(tokens) == NUM_NEW
    assert answers.num_cached(mine) == 0


def check(
    found: list[TokenLogprobs], wanted: torch.Tensor, tokens: list[int], num_top: int
) -> None:
    assert len(found) == len(wanted) == len(tokens)
    for one, row, token in zip(found, wanted, tokens, strict=True):
        top = row.topk(num_top)
        assert one.chosen == pytest.approx(row[token].item(), abs=2e-4)
        assert one.top == pytest.approx(top.values.tolist(), abs=2e-4)
        assert one.top_token_ids == tuple(top.indices.tolist())


def test_seeds_give_the_same_tokens_after_preemption_and_in_company(core: Core) -> None:
    prompt = prompt_of(21)
    params = SamplingParams(
        1.0, top_k=40, seed=9, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2
    )
    alone = Answers(core)
    expected = alone.add(prompt, params)
    alone.run()
    answers = Answers(core)
    others = [answers.add(prompt_of(5, seed), SamplingParams(1.0, seed=9)) for seed in range(3)]
    mine = answers.add(prompt, params)
    for _ in range(3):
        for _ in range(5):
            answers.step()
        answers.preempt(mine)
    answers.run()
    assert answers.tokens(mine) == alone.tokens(expected)
    assert len(set(answers.tokens(mine))) > 5
    assert all(len(answers.tokens(other)) == NUM_NEW for other in others)
