"""The tokenizer's edges, and the built-in model's own tokenizer and template."""

import asyncio
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from services.common.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.common.model_store import DEFAULT_MODEL, default_cache_dir, resolve
from services.router.request import ChatPrompt
from services.router.served_model import ServedModel
from services.router.text.assembler import TextAssembler
from services.router.text.tokenizer import Tokenizer
from tests.unit.router.cluster import served_model
from tests.unit.router.vocabulary import byte_level_bpe


async def test_work_runs_in_threads_of_its_own() -> None:
    tokenizer = Tokenizer(byte_level_bpe())
    encode = await tokenizer.in_encode_thread(threading.get_ident)
    decode = await tokenizer.in_decode_thread(threading.get_ident)
    assert len({encode, decode, threading.get_ident()}) == 3
    tokenizer.close()


async def test_a_saved_tokenizers_truncation_is_not_taken_over() -> None:
    saved = byte_level_bpe()
    saved.enable_truncation(3)
    saved.enable_padding(length=50)
    tokenizer = Tokenizer(saved)
    assert len(await tokenizer.encode("x" * 20, add_special_tokens=True)) == 20
    tokenizer.close()


async def test_long_texts_are_refused_without_encoding() -> None:
    model = served_model()
    assert model.tokenizer.min_tokens("hello" * 100) <= 100
    with pytest.raises(ContextLengthExceeded, match="at least"):
        await model.tokens_of("x" * 1_000_000, max_tokens=1000)
    model.tokenizer.close()


async def test_no_template_means_no_chat() -> None:
    model = served_model()
    without = replace(model, template=None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        await without.tokens_of(ChatPrompt(({"role": "user", "content": "x"},)), 100)
    model.tokenizer.close()


def test_vocab_size_is_the_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    for config, expected in [({"vocab_size": 500}, 500), ({}, byte_level_bpe().get_vocab_size())]:
        (tmp_path / "config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.vocab_size == expected
        tokenizer.close()


@pytest.mark.model
def test_the_built_in_model() -> None:
    folder = resolve(DEFAULT_MODEL, default_cache_dir(os.environ), print)
    model = ServedModel.load(folder, DEFAULT_MODEL)
    text = "Grüße, 世界 😀! 1234 + 5678\n\tdef f(x): return x"
    token_ids = asyncio.run(model.tokens_of(text, 1000))
    assembler = TextAssembler(model.tokenizer.decode, [])
    pieces = [assembler.push([token_id]) for token_id in token_ids]
    assert "".join([*pieces, assembler.flush()]) == text
    chat = asyncio.run(model.tokens_of(ChatPrompt(({"role": "user", "content": "Hi"},)), 1000))
    rendered = model.tokenizer.decode(chat)
    assert rendered.endswith("user\nHi\nassistant\n")
    model.tokenizer.close()
