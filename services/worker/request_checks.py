"""What a call asks of this instance, refused by name or made a request. Used by the server."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from protos.infinite_llm.v1 import types_pb2, worker_pb2
from services.common.errors import ContextLengthExceeded, InvalidRequest
from services.common.ids import ReqId, new_req_id
from services.common.sampling import SamplingParams
from services.worker.engine.sequence import Request
from services.worker.grammar_loader import GrammarLoader
from services.worker.rmanager.ranks import check_arrival


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask of this instance and the peers that it knows."""

    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    eos_token_ids: frozenset[int]


class RequestChecks:
    def __init__(
        self, limits: Limits, borrowable_blocks: Callable[[], int], grammars: GrammarLoader
    ) -> None:
        self._limits = limits
        self._borrowable_blocks = borrowable_blocks
        self._grammars = grammars

    async def check(self, request: worker_pb2.GenerateTokensRequest) -> Request:
        checked = self._checked(request)
        if not request.grammar:
            return checked
        if request.ignore_eos or not self._limits.eos_token_ids:
            # The end of a grammar is an end token.
            raise InvalidRequest("a grammar needs the model's end tokens", "ignore_eos")
        return replace(checked, grammar=await self._grammars.load(request.grammar))

    def _checked(self, request: worker_pb2.GenerateTokensRequest) -> Request:
        limits, prompt = self._limits, tuple(request.prompt_token_ids)
        if not prompt:
            raise InvalidRequest("the prompt is empty", "prompt")
        self._check_token_ids(prompt, "prompt")
        if request.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1", "max_tokens")
        capacity = min(limits.max_model_len, self._capacity_tokens())
        if len(prompt) + request.max_tokens > capacity:
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens and max_tokens {request.max_tokens} exceed the "
                f"{capacity} tokens that one request may use",
                "max_tokens" if len(prompt) < capacity else "prompt",
            )
        sampling = _sampling(request.sampling)
        self._check_token_ids(sampling.logit_bias, "logit_bias")
        self._check_token_ids(request.stop_token_ids, "stop_token_ids")
        if sampling.min_tokens > request.max_tokens:
            raise InvalidRequest("min_tokens must be at most max_tokens", "min_tokens")
        ends = frozenset(request.stop_token_ids)
        if not request.ignore_eos:
            ends |= limits.eos_token_ids
        return Request(
            ReqId(request.req_id) if request.req_id else new_req_id(),
            prompt,
            request.max_tokens,
            sampling,
            ends,
            request.priority,
            check_arrival(request.arrived_at_s) or time.time(),
            request.cache_salt,
            self._output_so_far(request, ends),
        )

    def _output_so_far(
        self, request: worker_pb2.GenerateTokensRequest, ends: frozenset[int]
    ) -> tuple[int, ...]:
        """Refuses what cannot be the beginning of this request's output."""
        param, output = "output_token_ids", tuple(request.output_token_ids)
        self._check_token_ids(output, param)
        if len(output) >= request.max_tokens:
            raise InvalidRequest("output_token_ids must be fewer than max_tokens", param)
        if not ends.isdisjoint(output):
            raise InvalidRequest("output_token_ids must not hold a token that ends", param)
        if output and request.sampling.temperature and not request.sampling.HasField("seed"):
            raise InvalidRequest("output_token_ids must come with the seed they had", "seed")
        return output

    def _check_token_ids(self, token_ids: Iterable[int], param: str) -> None:
        if max(token_ids, default=0) >= self._limits.vocab_size:
            raise InvalidRequest(f"token ids must be below {self._limits.vocab_size}", param)

    def _capacity_tokens(self) -> int:
        """KV that the whole cluster could give one request."""
        return (self._limits.num_blocks + self._borrowable_blocks()) * self._limits.block_size


def _sampling(params: types_pb2.SamplingParams) -> SamplingParams:
    # Unset travels as 0, which no caller can mean for top_p (an empty distribution) and
    # repetition_penalty (a division by it).
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p or 1.0,
        top_k=params.top_k,
        seed=params.seed if params.HasField("seed") else new_req_id(),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty or 1.0,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        min_tokens=params.min_tokens,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )
