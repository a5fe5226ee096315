"""`python -m services.operator`: makes workers out of InfiniteLLM resources, until a signal."""

import asyncio
import os
import socket
import sys
import time
import uuid
from contextlib import AsyncExitStack

from prometheus_client import REGISTRY

from services.common.config import from_env
from services.common.lifecycle import run
from services.common.telemetry import configure_logging, start_metrics_server
from services.operator.api import connect, kubeconfig_of
from services.operator.cluster_view import ClusterViews
from services.operator.config import OperatorConfig
from services.operator.health import health_server
from services.operator.leading import Leading
from services.operator.lease import LeaseHolder
from services.operator.metrics import OperatorMetrics

#: Without an attempt at the lease for so long this process hangs.
_ALIVE_S = 60.0


async def serve(config: OperatorConfig, kubeconfig: str | None, stop: asyncio.Event) -> None:
    configure_logging("operator", config.log_level)
    async with AsyncExitStack() as stack:
        stack.enter_context(start_metrics_server(config.metrics_port, config.listen_host))
        api = await connect(kubeconfig)
        stack.push_async_callback(api.close)
        views = ClusterViews()
        stack.push_async_callback(views.close)
        identity = f"{config.pod_name or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
        lease = LeaseHolder(
            api, config.namespace, config.lease_name, identity, config.lease_s, time.monotonic
        )
        leading = Leading(config, api, views, lease, OperatorMetrics(REGISTRY))
        await stack.enter_async_context(
            health_server(
                config.listen_host,
                config.health_port,
                lambda: time.monotonic() - lease.last_try_s < _ALIVE_S,
                lambda: leading.is_ready,
            )
        )
        await leading.run(stop)


def main() -> int:
    kubeconfig = kubeconfig_of(os.environ)
    return run(lambda stop: serve(from_env(OperatorConfig, os.environ), kubeconfig, stop))


if __name__ == "__main__":
    sys.exit(main())
