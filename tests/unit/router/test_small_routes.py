"""What the router answers besides generating: tokens, version, readiness."""

from typing import Any

import httpx
import pytest

from tests.unit.router.cluster import MODEL, TOKENIZER, FakeWorker, running, say

MESSAGES = [{"role": "user", "content": "hello"}]
RENDERED = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


async def post(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with (
        running([FakeWorker(1, say("ok"))]) as cluster,
        httpx.AsyncClient(base_url=cluster.url) as http,
    ):
        answer = await http.post(path, json=body)
        return answer.status_code, answer.json()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"prompt": "hello €"}, "hello €"),
        ({"model": MODEL, "prompt": ""}, ""),
        ({"prompt": "hi", "add_special_tokens": False, "return_token_strs": None}, "hi"),
        ({"messages": MESSAGES}, RENDERED),
    ],
)
async def test_tokenize(body: dict[str, Any], text: str) -> None:
    status, answer = await post("/tokenize", body)
    token_ids = TOKENIZER.encode(text).ids
    assert (status, answer["tokens"], answer["count"]) == (200, token_ids, len(token_ids))
    assert answer["max_model_len"] == 512
    assert "token_strs" not in answer


async def test_tokenize_tells_how_the_vocabulary_writes_them() -> None:
    _, answer = await post("/tokenize", {"prompt": "hello €", "return_token_strs": True})
    assert answer["token_strs"] == TOKENIZER.encode("hello €").tokens


async def test_detokenize_is_its_inverse() -> None:
    for text in (RENDERED, "hello €", ""):
        token_ids = TOKENIZER.encode(text).ids
        assert await post("/detokenize", {"tokens": token_ids}) == (200, {"prompt": text})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "more": 1}, 400, "more"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "model"),
    ],
)
async def test_errors_name_the_field(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answered, answer = await post(path, body)
    assert (answered, answer["error"]["param"]) == (status, param)


async def test_ready_while_an_instance_is_and_live_always() -> None:
    for workers, ready in [([], 503), ([FakeWorker(1, say("ok"))], 200)]:
        async with (
            running(workers) as cluster,
            httpx.AsyncClient(base_url=cluster.url) as http,
        ):
            for path, status in [("/ready", ready), ("/health", ready), ("/live", 200)]:
                assert (await http.get(path)).status_code == status
                assert (await http.head(path)).status_code == status
            assert (await http.get("/version")).json().keys() == {"version"}
