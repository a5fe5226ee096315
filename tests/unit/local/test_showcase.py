"""One prompt is followed from both sides: its text, and where its blocks lie."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from rich.console import Console

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2
from services.common.addresses import free_ports
from services.common.errors import InfiniteLLMError
from services.common.rpc import new_server
from services.local.client import ChatRequest
from services.local.map_reader import ClusterView
from services.local.screen import Screen
from services.local.showcase import Audience, run_prompt

REQUEST = ChatRequest("m", "hello", max_tokens=2)
SILENT = Audience(on_view=lambda _: None, on_text=lambda _: None)


class FakeGManager(gmanager_pb2_grpc.GManagerServicer):
    """Each look shows one borrowed block more, up to three; the third means two were taken in."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.looked_enough = asyncio.Event()

    async def GetClusterView(
        self, request: gmanager_pb2.GetClusterViewRequest, context: Any
    ) -> ClusterView:
        self.num_looks += 1
        if self.num_looks >= 3:
            self.looked_enough.set()
        load = types_pb2.InstanceLoad(borrowed_blocks=min(3, self.num_looks))
        row = types_pb2.RequestPlacementEntry(req_id=1, num_blocks=1)
        return ClusterView(instances=[types_pb2.InstanceView(load=load)], entries=[row])


@asynccontextmanager
async def gmanager(servicer: FakeGManager) -> AsyncIterator[str]:
    server = new_server()
    gmanager_pb2_grpc.add_GManagerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(grace=None)


@asynccontextmanager
async def router(*pieces: str, after: asyncio.Event) -> AsyncIterator[str]:
    """Streams the pieces as soon as the event is set."""
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": len(pieces)}}
    events = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await after.wait()
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, usage])
        writer.write(f"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_outcome_has_the_text_the_counts_and_the_peak() -> None:
    servicer = FakeGManager()  # type: ignore[abstract]
    async with (
        gmanager(servicer) as address,
        router("Hi", "!", after=servicer.looked_enough) as url,
    ):
        outcome = await run_prompt(url, address, REQUEST, SILENT)
    assert (outcome.text, outcome.prompt_tokens, outcome.completion_tokens) == ("Hi!", 5, 2)
    assert outcome.borrowed_blocks_peak >= 2


async def test_without_a_map_the_answer_still_comes() -> None:
    now = asyncio.Event()
    now.set()
    (port,) = free_ports(1)
    async with router("Hi", after=now) as url:
        outcome = await run_prompt(url, f"127.0.0.1:{port}", REQUEST, SILENT)
    assert (outcome.text, outcome.borrowed_blocks_peak) == ("Hi", 0)


async def test_without_a_router_the_error_is_ours() -> None:
    http_port, grpc_port = free_ports(2)
    with pytest.raises(InfiniteLLMError):
        await run_prompt(f"http://127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}", REQUEST, SILENT)


async def test_outside_a_terminal_the_map_comes_once_and_then_the_text() -> None:
    console = Console(width=100, color_system=None, force_terminal=False)
    servicer = FakeGManager()  # type: ignore[abstract]
    with console.capture() as capture:
        async with (
            gmanager(servicer) as address,
            router("Hi", "!", after=servicer.looked_enough) as url,
        ):
            with Screen(console) as screen:
                await run_prompt(url, address, REQUEST, screen.audience)
    output = capture.get()
    assert output.count("Request Placement Map") == 1
    assert output.endswith("Hi!\n")
