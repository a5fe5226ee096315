"""Who can lend right now, best first: the answer to a prefill that cannot wait for a plan.

Pure; called by `server` for FindCreditors.
"""

from collections.abc import Iterable

from services.gmanager.cluster import Instance


def rank_creditors(instances: Iterable[Instance], debtor: Instance) -> list[Instance]:
    """Same node first, since its link is the shortest, then the most free blocks."""
    able = [
        instance
        for instance in instances
        if instance.inst_id != debtor.inst_id
        and instance.load.free_blocks > 0
        and not instance.load.draining
        and instance.info.block_format == debtor.info.block_format
    ]
    return sorted(
        able,
        key=lambda instance: (
            instance.info.node != debtor.info.node,
            -instance.load.free_blocks,
            instance.inst_id,
        ),
    )
