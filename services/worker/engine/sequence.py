"""The engine's state of one request. Owned by the engine thread alone."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from services.common.errors import InfiniteLLMError
from services.common.ids import ReqId
from services.common.sampling import GREEDY, SamplingParams
from services.worker.engine.sampling.grammar import Grammar
from services.worker.engine.sampling.state import SamplingState, TokenLogprobs
from services.worker.kvcache.block_hash import BlockHash, extend_hashes, root_hash
from services.worker.kvcache.block_table import BlockTable
from services.worker.rank import Rank


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asks for: token ids in, at most `max_tokens` token ids out."""

    req_id: ReqId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    """All that end the sequence, the model's own included."""
    priority: int = 0
    """Smaller goes first; equals go by age."""
    arrived_at_s: float = 0.0
    """On the router's wall clock: the same on every instance that serves the request."""
    cache_salt: str = ""
    """Only requests with the same salt share cached prefixes."""
    output_token_ids: tuple[int, ...] = ()
    """What another instance generated before it was lost; `max_tokens` counts it."""
    grammar: Grammar | None = None
    """What the output must match; of this request alone."""

    @property
    def rank(self) -> Rank:
        return Rank(self.priority, self.arrived_at_s, self.req_id)

    @property
    def max_sequence_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens known so far, how many of them have their KV, and where that KV lies."""

    request: Request
    rank: Rank
    """Smaller goes first, and has first claim on memory."""
    table: BlockTable
    token_ids: list[int]
    num_computed: int = 0
    holes: list[range] = field(default_factory=list)
    """Tokens below `num_computed` whose KV was lost with a creditor, in order."""
    is_running: bool = False
    order: int = 0
    """The number of the order that moves blocks of it; 0 while none does. Whatever another order
    brings is void: that one is over, or the blocks that it named were given up."""
    moving: range = range(0)
    """Blocks of that order that are not committed yet."""
    waiting_since_s: float = 0.0
    """When it last joined the queue or, while running, was not held up for want of memory."""
    num_stalls: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    """Of the full blocks of `token_ids`, as far as they were needed."""
    root_hash: BlockHash = field(default_factory=root_hash)
    num_cached_tokens: int | None = None
    """Prompt tokens that were found computed when it was first admitted."""
    sampling: SamplingState = field(default_factory=SamplingState)

    @classmethod
    def of(cls, request: Request, block_size: int, now_s: float) -> "Sequence":
        table = BlockTable(block_size)
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        root = root_hash(request.cache_salt)
        return cls(request, request.rank, table, tokens, waiting_since_s=now_s, root_hash=root)

    @property
    def req_id(self) -> ReqId:
        return self.request.req_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - len(self.request.prompt_token_ids)

    @property
    def failure(self) -> InfiniteLLMError | None:
        """Why no token is right any more, and the sequence ends without one."""
        grammar = self.request.grammar
        return None if grammar is None else grammar.error

    @property
    def num_uncomputed(self) -> int:
        num_at_end = len(self.token_ids) - self.num_computed
        return num_at_end + sum(map(len, self.holes)) if self.holes else num_at_end

    @property
    def next_chunk(self) -> range:
        """The tokens to compute next: a hole's, oldest first, then those at the end."""
        return self.holes[0] if self.holes else range(self.num_computed, len(self.token_ids))

    def advance(self, num_tokens: int) -> None:
        """So many of the next chunk have their KV now."""
        if not self.holes:
            self.num_computed += num_tokens
            return
        rest = self.holes[0][num_tokens:]
        self.holes[:1] = [rest] if rest else []

    def lose(self, tokens: range) -> None:
        """Their KV is gone. Holes that touch become one, so that one chunk may fill both."""
        before = [hole for hole in self.holes if hole.start < tokens.start]
        after = [hole for hole in self.holes if hole.start > tokens.start]
        if before and before[-1].stop == tokens.start:
            tokens = range(before.pop().start, tokens.stop)
        if after and after[0].start == tokens.stop:
            tokens = range(tokens.start, after.pop(0).stop)
        self.holes = [*before, tokens, *after]

    @property
    def is_moving(self) -> bool:
        return self.order > 0

    @property
    def movable_blocks(self) -> range:
        """The oldest full blocks here that follow each other; none while others are moving."""
        if self.is_moving:
            return range(0)
        start, size = 0, self.table.block_size
        for hole in self.holes:
            if run := self.table.local_run(start, hole.start // size):
                return run
            start = hole.stop // size
        return self.table.local_run(start, self.num_computed // size)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of the prompt are still to be computed: not without its hidden states."""
        if self.request.sampling.prompt_logprobs is None:
            return False
        return len(self.sampling.prompt_logprobs) < len(self.request.prompt_token_ids) - 1

    def hash_full_blocks(self, num_tokens: int) -> None:
        """Name the full blocks of the first `num_tokens` tokens."""
        extend_hashes(
            self.hashes, self.root_hash, self.token_ids, num_tokens, self.table.block_size
        )

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Whether the token just appended ends the sequence."""
        if token_id in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_output_tokens >= self.request.max_tokens:
            return FinishReason.LENGTH
        return None


class SequenceOutput(NamedTuple):
    """What a step brought for one request: tokens, an end, or an error."""

    req_id: ReqId
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: InfiniteLLMError | None = None
    num_cached_tokens: int = 0
    """Of the prompt, with the first output."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of `token_ids`, where they were asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """With the first output: of the prompt's tokens from the second on."""

    @classmethod
    def of_step(
        cls, sequence: Sequence, token_ids: tuple[int, ...], reason: FinishReason | None
    ) -> "SequenceOutput":
        """After `sequence` got its next token; `token_ids` is what the caller may see of it."""
        is_first = sequence.num_output_tokens == len(sequence.request.output_token_ids) + 1
        state = sequence.sampling
        return cls(
            sequence.req_id,
            token_ids,
            reason,
            num_cached_tokens=(sequence.num_cached_tokens or 0) if is_first else 0,
            logprobs=(state.last_logprobs,) if token_ids and state.last_logprobs else (),
            prompt_logprobs=tuple(state.prompt_logprobs) if is_first else (),
        )

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


@dataclass(slots=True)
class ScheduledSequence:
    """The tokens of `sequence` from `start` on that run in this step."""

    sequence: Sequence
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """Whether the step reaches the end of what is known, so that the next token is sampled."""
        return self.end == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class MoveOrder:
    """Full local blocks of one sequence, oldest first, that should move to creditors."""

    rank: Rank
    number: int
    block_ids: tuple[int, ...]
    claimant: Rank | None = None
    """Who cannot go on without this, so that younger requests elsewhere give way to it."""

    @property
    def req_id(self) -> ReqId:
        return self.rank.req_id


@dataclass(slots=True)
class Schedule:
    """What one step runs, and what it leaves to the rManager."""

    max_tokens: int = 0
    """The budget of the step."""
    items: list[ScheduledSequence] = field(default_factory=list)
    moves: list[MoveOrder] = field(default_factory=list)
    failed: list[SequenceOutput] = field(default_factory=list)
    num_preempted: int = 0
    num_recalled_blocks: int = 0
    """Blocks lent to others that are wanted back."""
    recall_claimant: Rank | None = None
    """The highest in rank of those who want them."""

    num_tokens: int = 0

    def share(self, num_behind: int) -> int:
        """Tokens that a sequence may take: half the rest while others behind it want some, too.

        So a short prompt behind a long one starts at once, and the long one still goes on.
        """
        left = self.max_tokens - self.num_tokens
        return -(-left // 2) if num_behind else left

    def add(self, sequence: Sequence, num_tokens: int) -> None:
        self.items.append(ScheduledSequence(sequence, sequence.next_chunk.start, num_tokens))
        self.num_tokens += num_tokens

    def recall(self, num_blocks: int, claimant: Rank) -> None:
        if num_blocks > 0:
            self.num_recalled_blocks = max(self.num_recalled_blocks, num_blocks)
            self.recall_claimant = min(self.recall_claimant or claimant, claimant)

    def remove(self, sequence: Sequence) -> None:
        """Take back what was planned for it, if anything was."""
        self.items = [item for item in self.items if item.sequence is not sequence]
        self.num_tokens = sum(item.num_tokens for item in self.items)
