"""A long prompt out of this repository's own texts, of a wanted length in tokens."""

import json
from collections.abc import Sequence
from itertools import cycle, islice

from tokenizers import Tokenizer

from services.common.errors import ConfigError
from services.local.client import ChatRequest
from services.local.plan import ClusterSpec
from services.local.process import REPO_ROOT

_QUESTION = "\n\nIn two sentences: what is the text above about?"
#: Longest prompt of a demonstration; a CPU needs several seconds for each thousand tokens.
_MAX_TOKENS = 6000
#: Room for the question and the chat template.
_MARGIN_TOKENS = 96
#: How far beyond one instance the prompt goes, and how much of the cluster it may fill.
_BEYOND_ONE = 1.35
_SHARE_OF_ALL = 0.9


def choose_num_tokens(spec: ClusterSpec, max_model_len: int, max_new_tokens: int) -> int:
    """More than one instance holds, but not more than the cluster and the model allow.

    Raises ConfigError where these allow none.
    """
    wanted = int(spec.instance_capacity_tokens * _BEYOND_ONE)
    pool = int(spec.instance_capacity_tokens * spec.num_instances * _SHARE_OF_ALL)
    limit = min(pool, max_model_len) - max_new_tokens - _MARGIN_TOKENS
    if limit < 1:
        raise ConfigError(
            f"{spec.num_blocks} KV blocks an instance leave no room for a prompt and "
            f"{max_new_tokens} new tokens; choose more with KV_BLOCKS="
        )
    return min(wanted, limit, _MAX_TOKENS)


def build_request(spec: ClusterSpec, max_new_tokens: int) -> ChatRequest:
    """A prompt that needs more KV memory than one instance of the cluster has."""
    model_config = json.loads((spec.model / "config.json").read_text())
    max_model_len = model_config["max_position_embeddings"]
    num_tokens = choose_num_tokens(spec, max_model_len, max_new_tokens)
    tokenizer = Tokenizer.from_file(str(spec.model / "tokenizer.json"))
    prompt = cut_text(tokenizer, _repository_texts(), num_tokens) + _QUESTION
    return ChatRequest(spec.model_name, prompt, max_new_tokens)


def cut_text(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int) -> str:
    """The texts one after the other, over and over, up to `num_tokens` tokens."""
    token_ids = [
        token_id
        for text in texts
        for token_id in tokenizer.encode(text, add_special_tokens=False).ids
    ]
    if not token_ids:
        raise ConfigError("there is no text to build a prompt from")
    return str(tokenizer.decode(list(islice(cycle(token_ids), num_tokens))))


def _repository_texts() -> list[str]:
    files = [*sorted((REPO_ROOT / "docs").glob("*.md")), REPO_ROOT / "LICENSE"]
    return [file.read_text() for file in files if file.is_file()]
