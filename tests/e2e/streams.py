"""Requests to the router as clients send them, one by one or as a steady load of streams."""

import json
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import httpx

MODEL = "smollm2-135m-instruct"
#: First token and whole request of a machine that also starts workers meanwhile.
TIMEOUT = httpx.Timeout(300.0, connect=20.0)


def chat(url: str, question: str, headers: dict[str, str] | None = None) -> str:
    body = {
        "model": MODEL,
        "max_tokens": 16,
        "temperature": 0,
        "messages": [{"role": "user", "content": question}],
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT, headers=headers)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["message"]["content"])


def stream(url: str, prompt: str, max_tokens: int) -> Iterator[dict[str, Any]]:
    """The chunks; raises where the stream breaks in any way."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    finish_reason = None
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=TIMEOUT) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code} {answer.read().decode()}")
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if not line or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(data)
            finish_reason = chunk["choices"][0]["finish_reason"]
            yield chunk
    if finish_reason != "length":
        raise RuntimeError(f"the stream ended with {finish_reason!r}")


class Load:
    """So many streams at a time, each followed by another, until the end of the block."""

    def __init__(self, url: str, num_streams: int, max_tokens: int = 48) -> None:
        self._url = url
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(index,), daemon=True)
            for index in range(num_streams)
        ]
        self.num_finished = 0
        self.broken: list[str] = []

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """What was begun runs to its end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(TIMEOUT.read)
            if thread.is_alive():
                self.broken.append("a stream hangs")

    def _run(self, index: int) -> None:
        turn = 0
        while not self._stop.is_set():
            prompt = f"Stream {index}, turn {turn}. Count slowly from one to a hundred:"
            try:
                for _ in stream(self._url, prompt, self._max_tokens):
                    pass
                self.num_finished += 1
            except (RuntimeError, httpx.HTTPError, ValueError) as error:
                self.broken.append(f"{type(error).__name__}: {error}")
                self._stop.wait(1.0)
            turn += 1
