"""The gRPC client against a router: all that the service offers, with and without keys."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from protos.infinite_llm.v1 import inference_pb2
from services.common.errors import Aborted, InvalidRequest, Unauthenticated
from services.common.inference_client import GenerateOptions, InferenceClient, Piece, Usage
from services.router.access.keys import ApiKey, KeyLimits, digest_of
from tests.unit.router.cluster import MODEL, TOKENIZER, FakeWorker, hang, running, say

DEADLINE_S = 10.0


async def collect(client: InferenceClient, into: list[Piece], request_id: str = "") -> None:
    async for piece in client.generate("hello", DEADLINE_S, request_id=request_id):
        into.append(piece)


async def until_begun(pieces: list[Piece]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not pieces:
            await asyncio.sleep(0.005)


def test_every_field_of_a_request_is_an_option() -> None:
    fields = {field.name for field in inference_pb2.GenerateRequest.DESCRIPTOR.fields}
    assert fields == GenerateOptions.__annotations__.keys() | {"prompt"}


async def test_pieces_end_with_reason_and_usage() -> None:
    worker = FakeWorker(1, say("hello €"))
    pieces: list[Piece] = []
    async with running([worker]) as cluster, InferenceClient(cluster.grpc_address) as client:
        async for piece in client.generate("hi", chat=True, temperature=0.5, logit_bias={3: 1.5}):
            pieces.append(piece)
        info = await client.model_info()
    assert "".join(piece.text for piece in pieces) == "hello €"
    assert {piece.finish_reason for piece in pieces[:-1]} == {None}
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    num_prompt, num_answer = (len(TOKENIZER.encode(text).ids) for text in (prompt, "hello €"))
    usage = Usage(num_prompt, num_answer, cached_tokens=0)
    assert (pieces[-1].finish_reason, pieces[-1].usage) == ("stop", usage)
    assert worker.requests[0].sampling.temperature == 0.5
    assert worker.requests[0].sampling.logit_bias == {3: 1.5}
    assert (info.model, info.max_request_tokens) == (MODEL, 512)
    assert info.vocab_size == TOKENIZER.get_vocab_size()
    assert info.has_chat_template and info.ready


async def test_errors_are_those_of_the_tree() -> None:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        InferenceClient(cluster.grpc_address) as client,
    ):
        with pytest.raises(InvalidRequest) as caught:
            [piece async for piece in client.generate("x", top_p=2.0)]
    assert caught.value.param == "top_p"


async def test_abort_ends_a_request_by_name() -> None:
    worker = FakeWorker(1, hang("some"))
    async with running([worker]) as cluster, InferenceClient(cluster.grpc_address) as client:
        pieces: list[Piece] = []
        generating = asyncio.create_task(collect(client, pieces, "mine"))
        await until_begun(pieces)
        assert not await client.abort("other")
        with pytest.raises(InvalidRequest):
            await collect(client, [], "mine")
        with pytest.raises(InvalidRequest):
            await collect(client, [], "x" * 129)
        assert await client.abort("mine")
        with pytest.raises(Aborted):
            await generating
        async with asyncio.timeout(1):
            await worker.aborted.wait()
        assert not await client.abort("mine")
        again = asyncio.create_task(collect(client, [], "mine"))
        again.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await again


async def test_who_stops_reading_ends_the_request() -> None:
    worker = FakeWorker(1, hang("some"))
    async with running([worker]) as cluster, InferenceClient(cluster.grpc_address) as client:
        async with contextlib.aclosing(client.generate("hello")) as pieces:  # type: ignore[type-var]
            async for _ in pieces:
                break
        async with asyncio.timeout(1):
            await worker.aborted.wait()


async def test_names_are_each_clients_own_and_limits_leave_abort(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    entries = [
        ApiKey(name, digest_of(name), KeyLimits(max_concurrent=1)) for name in ("alice", "bob")
    ]
    keys.write_text("\n".join(entry.line() for entry in entries))
    async with (
        running([FakeWorker(1, hang("some"))], api_keys_file=keys) as cluster,
        InferenceClient(cluster.grpc_address, api_key="alice") as alice,
        InferenceClient(cluster.grpc_address, api_key="bob") as bob,
        InferenceClient(cluster.grpc_address) as nobody,
    ):
        pieces: list[Piece] = []
        generating = asyncio.create_task(collect(alice, pieces, "mine"))
        await until_begun(pieces)
        assert not await bob.abort("mine")
        with pytest.raises(Unauthenticated):
            await nobody.abort("mine")
        with pytest.raises(Unauthenticated):
            await nobody.model_info()
        assert await alice.abort("mine")
        with pytest.raises(Aborted):
            await generating
