"""How many tokens one request may use, at all and now. Pure.

Generation refuses at once what can never fit; what does not fit now waits in the waiting line.
"""

from collections.abc import Sequence

from services.common.lendable import pooled_tokens
from services.router.routing import Dispatched, Instance, headroom

#: Requests that may wait on an instance itself. A view is too old to fill its steps from here: a
#: request that ends there should find the next one beside it.
MAX_BACKLOG = 4

#: An instance that has been away for longer does not come back by itself.
RESTART_S = 120.0


def max_request_tokens(instances: Sequence[Instance]) -> int:
    """Returns the longest sequence (prompt and output) that the instances can hold together.

    The model's context bounds it; without pooling, discovery lowers that to one instance's memory.
    """
    if not instances:
        return 0
    context = max(instance.max_model_len for instance in instances)
    return min(context, pooled_tokens((i.num_blocks, i.block_size) for i in instances))


class UsualCapacity:
    """The most that one request could use lately: who is started anew will soon be back."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._seen_s = 0.0

    def note(self, num_tokens: int, now_s: float) -> None:
        """What it is now."""
        if num_tokens >= self.num_tokens or now_s - self._seen_s > RESTART_S:
            self.num_tokens, self._seen_s = num_tokens, now_s


class Room:
    """What instances could take now, as far as their reports and what was sent since tell."""

    def __init__(
        self, instances: Sequence[Instance], dispatched: Dispatched, is_pooling: bool
    ) -> None:
        free = [(headroom(i, dispatched), i.block_size) for i in instances]
        groups = [free] if is_pooling else [[one] for one in free]
        self._tokens = [pooled_tokens(group) for group in groups]
        """What may be had together; without pooling every instance is alone."""
        waiting = (i.num_waiting + dispatched.unreported(i)[1] for i in instances)
        self._backlog = sum(max(0, MAX_BACKLOG - num_waiting) for num_waiting in waiting)

    def take(self, num_tokens: int) -> bool:
        """Whether a request that begins with so many tokens may go; if so it is counted."""
        most = max(self._tokens, default=0)
        if num_tokens <= most:
            self._tokens[self._tokens.index(most)] -= num_tokens
            return True
        self._backlog -= 1
        return self._backlog >= 0
