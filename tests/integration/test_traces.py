"""One request is one trace, from the router over its worker to the creditor that lent to it."""

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.integration.cluster import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    http_client,
    make_spec,
    running_cluster,
)

pytestmark = [pytest.mark.integration, pytest.mark.model]

#: A span as (trace id, name, service).
Span = tuple[bytes, str, str]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps every span that services export."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    async def Export(self, request: Any, context: object) -> Any:
        for resource in request.resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [(s.trace_id, s.name, names["service.name"]) for s in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call]
        collector, server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield collector, f"http://127.0.0.1:{port}"
    await server.stop(None)


async def test_router_worker_and_creditor_share_the_trace_of_the_client(
    collector: tuple[Collector, str],
) -> None:
    kept, endpoint = collector
    roles = ("router", "worker", "gmanager")
    spec = replace(make_spec(2), overrides={role: {"otlp_endpoint": endpoint} for role in roles})
    trace_id = "4bf92f3577b34da6a3ce929d0e0e4736"
    async with running_cluster(spec) as cluster, http_client(cluster) as http:
        answer = await http.post(
            "/v1/completions",
            json={
                "model": spec.model_name,
                "prompt": [1000] * (NUM_BLOCKS * BLOCK_SIZE + 100),
                "max_tokens": 4,
            },
            headers={"traceparent": f"00-{trace_id}-00f067aa0ba902b7-01"},
        )
        assert answer.status_code == 200, answer.text
    # The services have stopped, and stopping flushes.
    seen = {(name.rsplit("/")[-1], service) for trace, name, service in kept.spans
            if trace.hex() == trace_id}  # fmt: skip
    assert ("Generate", "worker") in seen, seen
    assert ("TryMoveKvCache", "worker") in seen, seen
    assert any(service == "router" for _, service in seen), seen
