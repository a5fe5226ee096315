"""One answer of the HTTP front door, as a client sees it, whatever becomes of it."""

import json
from dataclasses import dataclass, field
from typing import Any

import httpx

from services.common.errors import BY_CODE, ContextLengthExceeded
from tests.soak.scenarios import Scenario


@dataclass(slots=True)
class Answer:
    """What came, token by token; `error_code` where it ended with an error that has one."""

    tokens: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error_code: str | None = None

    @property
    def failed_clearly(self) -> bool:
        """The client may try again, at the latest when the cluster is whole again."""
        kind = BY_CODE.get(self.error_code or "")
        return kind is not None and (kind.is_retryable or kind is ContextLengthExceeded)

    def agrees_with(self, expected: "Answer") -> bool:
        """All of it, or what came until the error."""
        if self.finish_reason is None:
            return self.tokens == expected.tokens[: len(self.tokens)]
        return (self.tokens, self.finish_reason) == (expected.tokens, expected.finish_reason)

    async def read(self, client: httpx.AsyncClient, model: str, scenario: Scenario) -> None:
        """Waits for as long as the caller does."""
        body = _body(model, scenario)
        async with client.stream("POST", "/v1/completions", json=body, timeout=None) as response:
            if response.is_error:
                self._add(json.loads(await response.aread()))
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._add(json.loads(line.removeprefix("data: ")))

    def _add(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error_code = event["error"]["code"]
            return
        (choice,) = event["choices"]
        self.tokens += choice["logprobs"]["tokens"]
        self.finish_reason = choice["finish_reason"]


def _body(model: str, scenario: Scenario) -> dict[str, object]:
    """Log probabilities are asked for because the tokens come with them."""
    sampling = scenario.sampling
    seeded = {"top_p": sampling.top_p, "seed": sampling.seed} if sampling.temperature else {}
    return {
        "model": model,
        "prompt": list(scenario.prompt),
        "max_tokens": scenario.max_tokens,
        "temperature": sampling.temperature,
        **seeded,
        "ignore_eos": True,
        "logprobs": 0,
        "stream": True,
    }
