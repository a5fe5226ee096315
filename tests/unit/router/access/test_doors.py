"""Who is let in by HTTP and gRPC, what the others are told, and what a change of the file does."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.common.errors import ConfigError, RateLimited, Unauthenticated
from services.common.rpc import error_from_rpc
from services.router import renewed
from services.router.access.key_file import KeyFile
from services.router.access.keys import ApiKey, KeyLimits, digest_of
from tests.unit.router.cluster import MODEL, Cluster, FakeWorker, hang, running, say

COMPLETION = {"model": MODEL, "prompt": "hello"}
KEY = "sk-alice"
DEADLINE_S = 10.0


def write_keys(path: Path, **keys: KeyLimits) -> None:
    """As an editor, or a Secret, does: another file in its place."""
    lines = [ApiKey(name, digest_of(f"sk-{name}"), limits).line() for name, limits in keys.items()]
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    os.replace(new, path)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    write_keys(path, alice=KeyLimits())
    return path


@asynccontextmanager
async def guarded(keys_file: Path, *workers: FakeWorker) -> AsyncIterator[Cluster]:
    async with running(workers or [FakeWorker(1, say("ok"))], api_keys_file=keys_file) as cluster:
        yield cluster


def client(cluster: Cluster, key: str | None = KEY) -> httpx.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=cluster.url, headers=headers)


async def test_every_route_but_the_probes_wants_a_key(keys_file: Path) -> None:
    async with guarded(keys_file) as cluster, client(cluster, None) as http:
        for path in ("/health", "/live"):
            assert (await http.get(path)).status_code == 200
        for header in ({}, {"Authorization": KEY}, {"Authorization": "Bearer sk-bob"}):
            for method, path in [
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("GET", "/openapi.json"),
                ("GET", "/nothing"),
                ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"),
            ]:
                answer = await http.request(method, path, headers=header)
                error = answer.json()["error"]
                assert (answer.status_code, error["code"]) == (401, "invalid_api_key")
                assert error["type"] == "invalid_request_error"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert "sk-bob" not in answer.text
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=KEY) as official:
            assert (await official.completions.create(model=MODEL, prompt="hello")).choices[
                0
            ].text == "ok"
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="no") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
    assert len(cluster.workers[0].requests) == 1


async def test_two_authorization_headers_are_none(keys_file: Path) -> None:
    async with guarded(keys_file) as cluster, client(cluster, None) as http:
        headers = [("Authorization", f"Bearer {KEY}"), ("Authorization", "Bearer other")]
        assert (await http.get("/v1/models", headers=headers)).status_code == 401


async def generate(cluster: Cluster, *metadata: tuple[str, str]) -> str:
    async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(
            inference_pb2.GenerateRequest(prompt="hello"), metadata=metadata, timeout=DEADLINE_S
        )
        return "".join([response.text async for response in call])


async def test_grpc_wants_the_same_key(keys_file: Path) -> None:
    async with guarded(keys_file) as cluster:
        assert await generate(cluster, ("authorization", f"Bearer {KEY}")) == "ok"
        for metadata in [(), (("authorization", "Bearer sk-bob"),)]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(cluster, *metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert type(error_from_rpc(caught.value)) is Unauthenticated
        async with grpc.aio.insecure_channel(cluster.grpc_address) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            answer = await probe.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [r async for r in reflection.ServerReflectionInfo(iter([request]))]
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", f"Bearer {KEY}"),)
            call = reflection.ServerReflectionInfo(iter([request]), metadata=metadata)
            assert [response async for response in call]


async def test_limits_are_each_keys_own(keys_file: Path) -> None:
    write_keys(keys_file, alice=KeyLimits(max_concurrent=1), bob=KeyLimits(max_concurrent=1))
    worker = FakeWorker(1, hang("some"))
    async with guarded(keys_file, worker) as cluster, client(cluster) as alice:
        stream = COMPLETION | {"stream": True}
        async with alice.stream("POST", "/v1/completions", json=stream) as answer:
            assert answer.status_code == 200
            refused = await alice.post("/v1/completions", json=COMPLETION)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(cluster, ("authorization", f"Bearer {KEY}"))
            assert type(error_from_rpc(caught.value)) is RateLimited
            async with client(cluster, "sk-bob") as bob:
                assert (await bob.get("/v1/models")).status_code == 200
        await asyncio.wait_for(worker.aborted.wait(), DEADLINE_S)
        async with asyncio.timeout(DEADLINE_S):
            while (await alice.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_tokens_are_counted_and_their_rate_is_told(keys_file: Path) -> None:
    write_keys(keys_file, alice=KeyLimits(tokens_per_minute=1_000_000), bob=KeyLimits(None, 3))
    async with guarded(keys_file) as cluster, client(cluster) as alice:
        answer = await alice.post("/v1/completions", json=COMPLETION)
        used = answer.json()["usage"]["total_tokens"]
        assert answer.headers["x-ratelimit-limit-tokens"] == "1000000"
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 1_000_000 - used
        async with client(cluster, "sk-bob") as bob:
            many = COMPLETION | {"prompt": list(range(100))}
            assert (await bob.post("/v1/completions", json=many)).status_code == 200
            refused = await bob.post("/v1/completions", json=COMPLETION)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            # About a hundred tokens at three a minute.
            assert 1900 < int(refused.headers["retry-after"]) < 2100
            assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_a_changed_file_counts_within_seconds(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed.Renewed.run, "__defaults__", (0.01,))

    async def until(http: httpx.AsyncClient, status: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while (await http.get("/v1/models")).status_code != status:
                await asyncio.sleep(0.01)

    async with (
        guarded(keys_file) as cluster,
        client(cluster) as alice,
        client(cluster, "sk-bob") as bob,
    ):
        assert (await bob.get("/v1/models")).status_code == 401
        write_keys(keys_file, bob=KeyLimits())
        await until(bob, 200)
        assert (await alice.get("/v1/models")).status_code == 401
        keys_file.write_text("nonsense")
        write_keys(keys_file, alice=KeyLimits())
        await until(alice, 200)


def test_a_wrong_file_changes_nothing(keys_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = KeyFile(keys_file)
    for text in (b"alice sk-in-plain", b"\xff", None):
        keys_file.unlink() if text is None else keys_file.write_bytes(text)
        keys.reload()
        assert keys.account_of(f"Bearer {KEY}").name == "alice"
        with pytest.raises(ConfigError, match="INFINITE_LLM_API_KEYS_FILE"):
            KeyFile(keys_file)
    assert caplog.text.count("API keys not reloaded") == 3
    assert "sk-in-plain" not in caplog.text


def test_a_reload_keeps_the_accounts(keys_file: Path) -> None:
    keys = KeyFile(keys_file)
    account = keys.account_of(f"Bearer {KEY}")
    with account.enter():
        write_keys(keys_file, alice=KeyLimits(max_concurrent=1))
        keys.reload()
        assert keys.account_of(f"bearer  {KEY} ") is account
        with pytest.raises(RateLimited), account.enter():
            pass


async def test_logs_name_the_client_and_nothing_it_said(
    keys_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "xyzzy"
    bodies: list[Any] = [
        {"model": MODEL, "prompt": secret},
        {"model": MODEL, "prompt": {"x": secret}},
        {"model": MODEL, "prompt": secret, secret: 1},
    ]
    async with guarded(keys_file) as cluster, client(cluster) as http:
        for body in bodies:
            await http.post("/v1/completions", json=body)
        await http.post("/v1/completions", content=f'{{"prompt": "{secret}')
        system = {"role": "system", "content": secret}
        late = [{"role": "user", "content": secret}, system]
        await http.post("/v1/chat/completions", json={"model": MODEL, "messages": late})
    ours = [record for record in caplog.records if record.name.startswith("services.")]
    told = [str(vars(record)) for record in ours]
    assert not any(secret in line or KEY in line for line in told)
    lines = [record for record in ours if record.getMessage() == "request"]
    assert [vars(record)["client"] for record in lines] == ["alice"] * len(lines) != []
