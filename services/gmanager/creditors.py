"""Who can lend right now, best first: the answer to a prefill that cannot wait for a plan.

Pure; called by `server` for FindCreditors.
"""

from collections.abc import Iterable

from services.gmanager.cluster import Instance


def rank_creditors(instances: Iterable[Instance], debtor: Instance) -> list[Instance]:
    """Same host first, since its link is the shortest, then the most free blocks."""
    able = [
        instance
        for instance in instances
        if instance.inst_id != debtor.inst_id
        and instance.load.free_blocks > 0
        and not instance.load.draining
        and instance.info.can_hold_blocks_of(debtor.info)
    ]
    return sorted(
        able,
        key=lambda instance: (
            _host(instance) != _host(debtor),
            -instance.load.free_blocks,
            instance.inst_id,
        ),
    )


def _host(instance: Instance) -> str:
    return instance.info.control_address.rpartition(":")[0]
