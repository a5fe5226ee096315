"""What a connection may cost before a request has begun, and TLS."""

import asyncio
import json
import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme

from protos.infinite_llm.v1 import inference_pb2, inference_pb2_grpc
from services.common.errors import ConfigError
from services.router import renewed
from services.router.config import RouterConfig
from services.router.http import protocol
from services.router.tls import ServerTls
from tests.unit.router.cluster import MODEL, FakeWorker, hang, running, say

COMPLETION = {"model": MODEL, "prompt": "hello"}
DEADLINE_S = 10.0


async def answer_to(port: int, *pieces: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(DEADLINE_S):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        [b"GET /live HTTP/1.1\r\n", *[b"a%d: %b\r\n" % (i, b"x" * 1000) for i in range(33)]],
        [b"GET /live HTTP/1.1\r\na: ", *[b"x" * 10_000] * 4],
        [b"GET /", *[b"x" * 10_000] * 4],
        [b"GET /live HTTP/1.1\r\na: " + b"x" * 40_000 + b"\r\n\r\n"],
    ],
    ids=["many", "endless value", "endless path", "one large"],
)
async def test_a_head_that_is_too_large(head: list[bytes]) -> None:
    async with running([]) as cluster:
        answer = await answer_to(cluster.router.http_port, *head)
        status, _, rest = answer.partition(b"\r\n")
        assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
        error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
        assert error["code"] == "headers_too_large"
        async with httpx.AsyncClient(base_url=cluster.url) as http:
            for _ in range(3):  # counted anew for each request of a connection
                large = {"a": "x" * 20_000}
                assert (await http.get("/live", headers=large)).status_code == 200


async def test_what_is_not_http_has_the_shape_of_all_errors() -> None:
    async with running([]) as cluster:
        answer = await answer_to(cluster.router.http_port, b"hello\r\n\r\n")
    status, _, rest = answer.partition(b"\r\n")
    assert status == b"HTTP/1.1 400 Bad Request"
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert error["type"] == "invalid_request_error"


async def test_a_head_that_never_ends_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_DEADLINE_S", 0.05)
    async with running([]) as cluster:
        for piece in (b"", b"GET /live HTTP/1.1\r\na: b"):
            assert await answer_to(cluster.router.http_port, piece) == b""


async def test_a_whole_request_is_not_cut_by_the_heads_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "HEAD_DEADLINE_S", 0.05)
    worker = FakeWorker(1, hang("some"))
    async with running([worker]) as cluster, httpx.AsyncClient(base_url=cluster.url) as http:
        stream = COMPLETION | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=stream) as answer:
            assert answer.status_code == 200
            await asyncio.sleep(0.1)
            assert not worker.aborted.is_set()


async def test_no_more_open_requests_than_allowed() -> None:
    worker = FakeWorker(1, hang("some"))
    async with (
        running([worker], max_open_requests=1) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        stream = COMPLETION | {"stream": True}
        async with http.stream("POST", "/v1/completions", json=stream):
            answer = await http.get("/v1/models")
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "overloaded"
            assert (await http.get("/live")).status_code == 200
        async with asyncio.timeout(DEADLINE_S):
            while (await http.get("/v1/models")).status_code != 200:
                await asyncio.sleep(0.01)


async def test_messages_of_grpc_have_the_limit_of_bodies() -> None:
    async with (
        running([FakeWorker(1, say("ok"))], max_body_bytes=1000) as cluster,
        grpc.aio.insecure_channel(cluster.grpc_address) as channel,
    ):
        stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            request = inference_pb2.GenerateRequest(prompt="x" * 1001)
            [response async for response in stub.Generate(request, timeout=DEADLINE_S)]
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_metrics_on_a_port_of_their_own(unused_tcp_port: int) -> None:
    async with running([], metrics_port=unused_tcp_port), httpx.AsyncClient() as http:
        answer = await http.get(f"http://127.0.0.1:{unused_tcp_port}/metrics")
        assert "infinite_llm_router_in_flight" in answer.text


def files_of(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    issued = authority.issue_cert("localhost")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    return certificate, key


async def test_both_doors_speak_tls_and_renew_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renewed.Renewed.run, "__defaults__", (0.05,))
    old, new = trustme.CA(), trustme.CA()
    certificate, key = files_of(old, tmp_path / "tls")

    async def ask(cluster_port: int, grpc_port: int, authority: trustme.CA) -> str:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        async with httpx.AsyncClient(verify=context) as http:
            answer = await http.get(f"https://localhost:{cluster_port}/live")
            assert answer.status_code == 200
        root = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        async with grpc.aio.secure_channel(f"localhost:{grpc_port}", root) as channel:
            stub: inference_pb2_grpc.InferenceAsyncStub = inference_pb2_grpc.InferenceStub(channel)
            request = inference_pb2.GenerateRequest(prompt="hello")
            call = stub.Generate(request, timeout=DEADLINE_S)
            return "".join([response.text async for response in call])

    worker = FakeWorker(1, say("ok"))
    async with running([worker], tls_certificate=certificate, tls_key=key) as cluster:
        ports = cluster.router.http_port, cluster.router.grpc_port
        assert await ask(*ports, old) == "ok"
        with pytest.raises(httpx.ConnectError):
            await ask(*ports, new)
        files_of(new, tmp_path / "tls")
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    assert await ask(*ports, new) == "ok"
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.1)


def test_files_that_are_no_pair_change_nothing(tmp_path: Path) -> None:
    certificate, key = files_of(trustme.CA(), tmp_path / "a")
    _, other_key = files_of(trustme.CA(), tmp_path / "b")
    tls = ServerTls(certificate, key)
    key.write_bytes(other_key.read_bytes())
    tls.reload()
    with pytest.raises(ConfigError, match="INFINITE_LLM_TLS_CERTIFICATE"):
        ServerTls(certificate, key)
    with pytest.raises(ConfigError, match="go together"):
        RouterConfig(tls_certificate=certificate)
