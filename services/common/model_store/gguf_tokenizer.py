"""Builds tokenizer.json and tokenizer_config.json from the lists inside a GGUF file.

The file names its pre-tokenizer rule (`tokenizer.ggml.pre`) and does not spell it out; ignoring the
name is a quiet error that shows only where digits follow several spaces.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.common.errors import ConfigError


class _TokenType(IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    tokenizer = build_tokenizer(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = tokens[token_id]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ConfigError(f"GGUF tokenizer model {kind!r} is not supported, only byte-level BPE")
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.get("tokenizer.ggml.pre", "gpt-2"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(_added_tokens(tokens, metadata["tokenizer.ggml.token_type"]))
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos_id = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    return tokenizer


def _pre_tokenizer(rule: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if rule == "gpt-2":
        return byte_level
    if rule == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    raise ConfigError(f"GGUF pre-tokenizer rule {rule!r} is not supported")


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Tokens that are matched in the text before any splitting; control tokens are special."""
    return [
        AddedToken(token, special=kind == _TokenType.CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_TokenType.CONTROL, _TokenType.USER_DEFINED)
    ]
