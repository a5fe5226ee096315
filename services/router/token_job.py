"""One sequence in the worker's terms, and what comes back, to and from the wire. Pure.

Made by generation, carried out by dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.ids import InstId, ReqId
from services.common.sampling import SamplingParams

FinishReason = Literal["stop", "length"]

_FINISH_REASONS: dict[int, FinishReason] = {
    worker_pb2.FINISH_REASON_STOP: "stop",
    worker_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class TokenJob:
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams
    seed: int
    """Always there: another instance must draw what a lost one would have drawn."""
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    prefers: InstId | None = None
    """The instance that has just computed the same prompt."""
    arrived_at_s: float = 0.0
    """By the wall clock, and the same wherever it goes on: older ones come first there."""
    output_token_ids: Sequence[int] = ()
    """What an instance that was lost has generated."""
    grammar: str = ""
    """What the output must match, from its first token on."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens

    @property
    def num_start_tokens(self) -> int:
        """What an instance must hold before the next token: all that is known, and that one."""
        return len(self.prompt_token_ids) + len(self.output_token_ids) + 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    chosen: float
    top: tuple[tuple[int, float], ...]
    """Token id and log probability of the likeliest, best first."""


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """One message of a worker."""

    inst_id: InstId
    token_ids: Sequence[int]
    logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    """Of the prompt; in the first chunk, as are `prompt_logprobs`."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None


def choice_seed(seed: int, choice: int) -> int:
    """The first choice has the request's own seed, the others have what follows from it."""
    if choice == 0:
        return seed
    # Seeds may be negative for clients; the worker takes the same 64 bits without a sign.
    words = (seed % 2**64).to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(blake2b(words, digest_size=8).digest(), "little")


def to_wire(req_id: ReqId, job: TokenJob) -> worker_pb2.GenerateTokensRequest:
    sampling = job.sampling
    params = types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        min_tokens=sampling.min_tokens,
        seed=job.seed % 2**64,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
    )
    return worker_pb2.GenerateTokensRequest(
        req_id=req_id,
        prompt_token_ids=job.prompt_token_ids,
        max_tokens=job.max_tokens,
        sampling=params,
        stop_token_ids=job.stop_token_ids,
        ignore_eos=job.ignore_eos,
        priority=job.priority,
        cache_salt=job.cache_salt,
        output_token_ids=job.output_token_ids,
        arrived_at_s=job.arrived_at_s,
        grammar=job.grammar,
    )


def from_wire(inst_id: InstId, response: worker_pb2.GenerateTokensResponse) -> TokenChunk:
    return TokenChunk(
        inst_id,
        response.token_ids,
        tuple(map(_logprobs, response.logprobs)),
        response.cached_tokens,
        tuple(map(_logprobs, response.prompt_logprobs)),
        _FINISH_REASONS.get(response.finish_reason),
    )


def _logprobs(message: worker_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(message.top_token_ids, message.top, strict=True)
    return TokenLogprobs(message.chosen, tuple(top))
