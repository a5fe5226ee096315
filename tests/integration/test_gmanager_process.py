"""`python -m services.gmanager` as a process: it outlives Redis, and its map outlives it."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from protos.infinite_llm.v1 import gmanager_pb2, gmanager_pb2_grpc, types_pb2, worker_pb2
from services.gmanager import convert
from tests.integration.gmanager_process import PROMPT_S, REPO, GManagerProcess
from tests.integration.proxy import certify, relaying, server_context, to_socket
from tests.integration.redis_server import RedisServer, eventually, running_redis
from tests.unit.gmanager.builders import make_info, make_row
from tests.unit.gmanager.fake_rmanager import FakeRManager, serving

pytestmark = pytest.mark.integration

#: The default.
HEARTBEAT_S = 0.5


@pytest.fixture
def gmanager(redis_server: RedisServer, tmp_path: Path) -> Iterator[GManagerProcess]:
    process = GManagerProcess(tmp_path / "gmanager.log", redis_url=redis_server.url)
    yield process
    process.kill()


async def report(
    stub: "gmanager_pb2_grpc.GManagerAsyncStub", sequence_number: int, num_blocks: int
) -> gmanager_pb2.HeartbeatResponse:
    entry = convert.entry_to_proto(make_row(7, 1, num_blocks))
    request = gmanager_pb2.HeartbeatRequest(
        inst_id=1,
        incarnation=1,
        sequence_number=sequence_number,
        full=sequence_number == 1,
        entries=[entry],
        load=types_pb2.InstanceLoad(free_blocks=100 - num_blocks),
    )
    return await stub.Heartbeat(request, timeout=PROMPT_S)


async def register(stub: "gmanager_pb2_grpc.GManagerAsyncStub") -> None:
    info = convert.info_to_proto(make_info(1))
    await stub.Register(gmanager_pb2.RegisterRequest(info=info), timeout=PROMPT_S)


async def rows_of(stub: "gmanager_pb2_grpc.GManagerAsyncStub") -> list[tuple[int, int]]:
    view = await stub.GetClusterView(gmanager_pb2.GetClusterViewRequest(), timeout=PROMPT_S)
    return [(entry.req_id, entry.num_blocks) for entry in view.entries]


async def test_a_restarted_gmanager_knows_the_map_at_once(
    gmanager: GManagerProcess, redis_server: RedisServer
) -> None:
    async with gmanager.stub() as stub:
        await register(stub)
        await report(stub, 1, 3)
        await eventually(lambda: redis_server.num_records() == (1, 1))
    gmanager.kill()
    gmanager.start()
    async with gmanager.stub() as stub:
        assert await rows_of(stub) == [(7, 3)]
        response = await report(stub, 2, 4)
        assert (response.register_again, response.full_report) == (False, True)


async def test_serving_goes_on_while_redis_freezes_dies_and_returns(
    gmanager: GManagerProcess, redis_server: RedisServer
) -> None:
    async with gmanager.stub() as stub:
        await register(stub)
        redis_server.process.send_signal(signal.SIGSTOP)
        for sequence_number in range(1, 20):
            if sequence_number == 10:
                redis_server.kill()
            await report(stub, sequence_number, sequence_number)
            assert await rows_of(stub) == [(7, sequence_number)]
            await asyncio.sleep(0.05)
        redis_server.start()
        await eventually(lambda: redis_server.num_records() == (1, 1))


async def test_the_copy_is_whole_within_two_heartbeats_of_redis_return(
    gmanager: GManagerProcess, redis_server: RedisServer
) -> None:
    async with gmanager.stub() as stub:
        await register(stub)
        await report(stub, 1, 3)
        await eventually(lambda: redis_server.num_records() == (1, 1))
        redis_server.kill()
        await eventually(lambda: gmanager.metric('redis_up{use="map"}') == 0)
        await report(stub, 2, 4)
        redis_server.start()
        start_s = time.monotonic()
        await eventually(lambda: redis_server.num_records() == (1, 1))
        assert time.monotonic() - start_s < 2 * HEARTBEAT_S + PROMPT_S
        await eventually(lambda: gmanager.metric('redis_up{use="map"}') == 1)
    (line,) = [line["message"] for line in gmanager.log if line["level"] == "warning"]
    assert line == "redis cannot be reached: the map is kept in memory alone"


async def test_tls_and_a_password_file_are_a_matter_of_settings(tmp_path: Path) -> None:
    ca, password_file = certify(tmp_path, "ca"), tmp_path / "password"
    password_file.write_text("secret\n")
    with running_redis(tmp_path, password="secret") as server:
        async with relaying(to_socket(server.socket), server_context(ca)) as relay:
            gmanager = GManagerProcess(
                tmp_path / "gmanager.log",
                redis_url=f"rediss://{relay.address}/0",
                redis_ca_file=ca,
                redis_password_file=password_file,
            )
            try:
                async with gmanager.stub() as stub:
                    await register(stub)
                    await report(stub, 1, 3)
                await eventually(lambda: server.num_records() == (1, 1))
            finally:
                gmanager.kill()


async def test_it_starts_and_stops_without_redis(
    gmanager: GManagerProcess, redis_server: RedisServer
) -> None:
    gmanager.kill()
    redis_server.kill()
    gmanager.start()
    async with gmanager.stub() as stub:
        await register(stub)
        with pytest.raises(grpc.aio.AioRpcError, match="block_size is missing"):
            info = types_pb2.InstanceInfo(inst_id=1, incarnation=1, control_address="here:1")
            await stub.Register(gmanager_pb2.RegisterRequest(info=info), timeout=PROMPT_S)
    gmanager.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(gmanager.process.wait, 10.0) == 0


async def test_a_debtor_is_told_to_move_to_an_idle_creditor(gmanager: GManagerProcess) -> None:
    source = FakeRManager(worker_pb2.MoveKvCacheResponse(accepted=True))
    debtor_load = types_pb2.InstanceLoad(
        running=2, waiting=6, waiting_blocks=60, running_tokens=1600
    )
    creditor_load = types_pb2.InstanceLoad(free_blocks=100)
    row = convert.entry_to_proto(make_row(7, 1, 80))
    async with serving(source) as address, gmanager.stub() as stub:
        for inst_id, load, entries in ((1, debtor_load, [row]), (2, creditor_load, [])):
            info = convert.info_to_proto(make_info(inst_id))
            info.control_address = address
            await stub.Register(gmanager_pb2.RegisterRequest(info=info), timeout=PROMPT_S)
            heartbeat = gmanager_pb2.HeartbeatRequest(
                inst_id=inst_id, incarnation=1, sequence_number=1,
                full=True, entries=entries, load=load,
            )  # fmt: skip
            await stub.Heartbeat(heartbeat, timeout=PROMPT_S)
        await eventually(lambda: len(source.requests) > 0)
        view = await stub.GetClusterView(gmanager_pb2.GetClusterViewRequest(), timeout=PROMPT_S)
    (request,) = source.requests
    assert (request.req_id, request.num_blocks, request.dst.inst_id) == (7, 60, 2)
    assert view.moves_issued == 1


def test_a_bad_setting_is_one_line_and_status_2() -> None:
    environ = {**os.environ, "INFINITE_LLM_BATCH_THRESHOLD": "many"}
    command = [sys.executable, "-m", "services.gmanager"]
    done = subprocess.run(command, cwd=REPO, env=environ, capture_output=True, text=True)
    assert done.returncode == 2
    assert "INFINITE_LLM_BATCH_THRESHOLD" in done.stderr
    assert len(done.stderr.splitlines()) == 1
