"""What one sequence has got so far, and whether, where and until when it is tried again. Pure.

One for each sequence, kept by dispatch. An instance that is lost costs its sequences nothing but
time: another one computes prompt and output again and goes on with the next token.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from services.common.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InfiniteLLMError,
    InstanceLost,
    Overloaded,
    Unavailable,
)
from services.common.ids import Incarnation, InstId
from services.router.routing import Instance
from services.router.token_job import TokenChunk, TokenJob

#: A defect that follows a request from instance to instance must not take all of them down; but who
#: streams for hours may well see as many restarts.
MAX_ATTEMPTS = 6
ATTEMPTS_WITHIN_S = 600.0
#: An instance that failed a sequence is not asked again for at least this long.
EXCLUDED_S = 2.0
#: A refusal that took longer came out of a queue: the client has waited enough.
RETRY_REFUSED_WITHIN_S = 5.0

#: Another instance may do better.
_WORTH_A_TRY = (Unavailable, InstanceLost, DeadlineExceeded, Overloaded)


@dataclass(frozen=True, slots=True)
class _Failure:
    incarnation: Incarnation
    at_s: float


class Recovery:
    def __init__(self, job: TokenJob, timeout_s: float, now_s: float) -> None:
        """`timeout_s`: after a failure, how long to wait for an instance that can go on."""
        self.num_failures = 0
        self.wait_until_s = now_s
        """Until then an instance may yet appear."""
        self._job = job
        self._timeout_s = timeout_s
        self._started_s = now_s
        self._attempts_s: list[float] = []
        """When they failed, as far as they count."""
        self._num_tokens_at_loss = -1
        self._has_begun = False
        self._token_ids: list[int] = []
        self._failures: dict[InstId, _Failure] = {}
        self._error: InfiniteLLMError = Unavailable("no instance is ready")

    @property
    def has_begun(self) -> bool:
        """Whether anything came: then the client may have it."""
        return self._has_begun

    @property
    def num_tokens(self) -> int:
        return len(self._token_ids)

    @property
    def is_complete(self) -> bool:
        """Only the word that it has ended was lost."""
        return self.num_tokens >= self._job.max_tokens

    @property
    def job(self) -> TokenJob:
        """What is left to do."""
        if not self._has_begun:
            return self._job
        # The prompt's log probabilities came with the first message.
        sampling = replace(self._job.sampling, prompt_logprobs=None)
        return replace(self._job, sampling=sampling, output_token_ids=tuple(self._token_ids))

    @property
    def error(self) -> InfiniteLLMError:
        """What the client is told if nobody can go on."""
        return self._error

    def receive(self, chunk: TokenChunk) -> None:
        self._has_begun = True
        self._token_ids += chunk.token_ids

    def fail(self, instance: Instance, error: InfiniteLLMError, now_s: float) -> bool:
        """Take note that `instance` failed; whether the sequence is worth another try."""
        is_first = self.num_failures == 0
        self.num_failures += 1
        self._failures[instance.inst_id] = _Failure(instance.incarnation, now_s)
        # The cluster has held the request before, and may again.
        has_shrunk = isinstance(error, ContextLengthExceeded) and not is_first
        if not (has_shrunk or isinstance(error, _WORTH_A_TRY)):
            self._error = error
            return False
        if self._has_begun:
            self._error = InstanceLost("the instance was lost, and no other could go on")
        elif not has_shrunk:
            self._error = error
        if isinstance(error, Overloaded):
            return self._find_full(now_s)
        self.wait_until_s = now_s + self._timeout_s
        return self._may_try_again(now_s)

    def _find_full(self, now_s: float) -> bool:
        if not self._has_begun:
            # Whoever has nothing yet and finds all instances full asks again later.
            self.wait_until_s = now_s
            has_queued = now_s - self._started_s > RETRY_REFUSED_WITHIN_S
            return self._may_try_again(now_s) and not has_queued
        if self.num_tokens == self._num_tokens_at_loss:
            # Turned away, it can have harmed nobody.
            return now_s < self.wait_until_s
        self.wait_until_s = now_s + self._timeout_s
        return self._may_try_again(now_s)

    def _may_try_again(self, now_s: float) -> bool:
        """After an attempt that may have been of harm."""
        self._num_tokens_at_loss = self.num_tokens
        recent = [at_s for at_s in self._attempts_s if now_s - at_s < ATTEMPTS_WITHIN_S]
        self._attempts_s = [*recent, now_s]
        return len(self._attempts_s) < MAX_ATTEMPTS

    def excluded(self, instances: Iterable[Instance], now_s: float) -> set[InstId]:
        """Those that failed the sequence and have not been heard of since.

        A process that was started anew is another instance, and may be asked at once.
        """
        return {
            instance.inst_id
            for instance in instances
            if (failure := self._failures.get(instance.inst_id)) is not None
            and failure.incarnation == instance.incarnation
            and (now_s < failure.at_s + EXCLUDED_S or instance.reported_at_s <= failure.at_s)
        }
