"""Log probabilities in the three shapes that clients know. Pure; used by the answers."""

from collections.abc import Sequence
from typing import Any

from services.router.text.logprobs import Candidate, ShownToken


def chat_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    content = [
        _chat_token(token.chosen) | {"top_logprobs": [_chat_token(other) for other in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ShownToken]) -> dict[str, Any]:
    """The chosen token is among the likeliest, whether or not it is one of them."""
    return {
        "tokens": [token.chosen.text for token in tokens],
        "token_logprobs": [None if token.is_first else token.chosen.logprob for token in tokens],
        "top_logprobs": [
            None
            if token.is_first
            else {other.text: other.logprob for other in (token.chosen, *token.top)}
            for token in tokens
        ],
        "text_offset": [token.offset for token in tokens],
    }


def prompt_logprobs(tokens: Sequence[ShownToken]) -> list[dict[str, Any] | None]:
    """An extension, by token id; the first token has none."""
    return [
        None
        if token.is_first
        else {
            str(other.token_id): {"logprob": other.logprob, "decoded_token": other.text}
            for other in (token.chosen, *token.top)
        }
        for token in tokens
    ]


def _chat_token(token: Candidate) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}
