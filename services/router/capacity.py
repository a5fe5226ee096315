"""How many tokens one request may use at all. Pure; generation refuses beyond it at once."""

from collections.abc import Sequence

from services.router.routing import Instance


def max_request_tokens(instances: Sequence[Instance]) -> int:
    """Returns the longest sequence (prompt and output) that the instances can hold together.

    Any of them may own the request; each of the others lends all but one block, which it keeps so
    that its own batch goes on. The model's context bounds the sum.
    """
    if not instances:
        return 0
    pool = sum(instance.num_blocks * instance.block_size for instance in instances)
    reserve = sum(instance.block_size for instance in instances)
    reserve -= max(instance.block_size for instance in instances)
    context = max(instance.max_model_len for instance in instances)
    return max(0, min(context, pool - reserve))
