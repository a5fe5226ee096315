"""What single tokens stand for, in both families of vocabularies."""

import tokenizers
from tokenizers import decoders, models

from services.router.text.token_bytes import TokenBytes
from tests.unit.router.vocabulary import byte_level_bpe


def test_byte_level_tokens_are_the_bytes_of_the_text() -> None:
    tokenizer = byte_level_bpe()
    text = "hello w\n€😀 \x7f\u00a0\u00ad"
    token_bytes = TokenBytes(tokenizer)
    assert b"".join(token_bytes.of(i) for i in tokenizer.encode(text).ids) == text.encode()


def test_special_tokens_are_their_names() -> None:
    tokenizer = byte_level_bpe()
    token_id = tokenizer.token_to_id("<|im_end|>")
    assert token_id is not None
    assert TokenBytes(tokenizer).of(token_id) == b"<|im_end|>"


def test_sentencepiece_tokens_have_spaces_and_single_bytes() -> None:
    vocab = {"▁the": 0, "<0xE2>": 1, "x": 2, "<0xZZ>": 3}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    token_bytes = TokenBytes(tokenizer)
    assert [token_bytes.of(i) for i in range(4)] == [b" the", b"\xe2", b"x", b"<0xZZ>"]


def test_a_token_beyond_the_vocabulary_is_empty() -> None:
    assert TokenBytes(byte_level_bpe()).of(10**6) == b""
