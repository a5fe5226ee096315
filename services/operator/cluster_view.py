"""What the gManager of a resource knows of its workers. Asked by `reconcile`."""

import logging
from collections.abc import Sequence

import grpc

from protos.infinite_llm.v1 import gmanager_pb2
from services.common.addresses import split_addresses, split_host_port
from services.common.errors import ConfigError
from services.common.gmanagers import GManagers
from services.common.rpc import PROBE_DEADLINE_S, error_from_rpc
from services.operator.plan import Load
from services.operator.resource import Resource

_log = logging.getLogger(__name__)


class ClusterViews:
    """Owns the channels to all gManagers; `close` ends them."""

    def __init__(self) -> None:
        self._gmanagers: dict[tuple[str, ...], GManagers] = {}
        self._away: set[tuple[str, ...]] = set()

    async def loads(self, resource: Resource) -> dict[str, Load] | None:
        """By control address; None where nobody answers."""
        try:
            addresses = qualified(resource.gmanager_address, resource.key.namespace)
        except ConfigError as error:
            _log.warning("no gManager", extra={"reason": error.message})
            return None
        if addresses not in self._gmanagers:
            self._gmanagers[addresses] = GManagers(addresses)
        request = gmanager_pb2.GetClusterViewRequest(instances_only=True)
        try:
            view = await self._gmanagers[addresses].ask(
                lambda gmanager: gmanager.GetClusterView(request, timeout=PROBE_DEADLINE_S)
            )
        except grpc.aio.AioRpcError as error:
            if addresses not in self._away:
                reason = error_from_rpc(error).message
                _log.warning("a gManager is away", extra={"at": addresses, "reason": reason})
            self._away.add(addresses)
            return None
        self._away.discard(addresses)
        return {
            instance.info.control_address: Load(
                num_lent_blocks=instance.load.lent_blocks,
                num_requests=instance.load.running + instance.load.waiting,
                is_draining=instance.load.draining,
            )
            for instance in view.instances
        }

    async def close(self) -> None:
        for gmanagers in self._gmanagers.values():
            await gmanagers.close()


def qualified(addresses: str, namespace: str) -> tuple[str, ...]:
    """As the pods of `namespace` understand them, which we need not be beside."""
    return tuple(
        meant for address in split_addresses(addresses) for meant in _meant(address, namespace)
    )


def _meant(address: str, namespace: str) -> Sequence[str]:
    host, port = split_host_port(address)
    here = f"{host}.{namespace}.svc:{port}"
    match host.count("."):
        case 0 if ":" not in host and host != "localhost":
            return [here]  # a Service
        case 1:
            return [here, address]  # a pod of a headless Service, or a name of any other kind
        case _:
            return [address]
