"""Incremental decoding equals decoding the whole, whatever the tokens and however they are cut."""

from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.router.text.detokenizer import MAX_PENDING_TOKENS, REPLACEMENT, Detokenizer
from tests.unit.router.vocabulary import byte_level_bpe

TOKENIZER = byte_level_bpe()
VOCAB_SIZE = TOKENIZER.get_vocab_size()


def decode(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=True)


def alphabet_of_bytes() -> dict[int, int]:
    """Token of each byte: printable bytes stand for themselves, the others follow 255 in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = TOKENIZER.get_vocab()
    return {byte: vocab[letter] for byte, letter in letters.items()}


TOKEN_OF = alphabet_of_bytes()


def pieces_of(messages: Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*(detokenizer.push(message) for message in messages), detokenizer.flush()]


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
@settings(deadline=None, max_examples=300)
def test_pieces_equal_the_whole_for_any_tokens(token_ids: list[int]) -> None:
    assert "".join(pieces_of([[t] for t in token_ids])) == decode(token_ids)


@given(st.lists(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5), max_size=20))
@settings(deadline=None)
def test_pieces_equal_the_whole_for_any_messages(messages: list[list[int]]) -> None:
    whole = [token_id for message in messages for token_id in message]
    assert "".join(pieces_of(messages)) == decode(whole)


#: Bytes that start, go on with or break sequences: a run of them is what random tokens rarely give.
HARD_BYTES = (
    0x41,
    0x80,
    0xBF,
    0xC2,
    0xE2,
    0x82,
    0xAC,
    0xF0,
    0x9F,
    0x98,
    0xED,
    0xA0,
    0xFF,
    0xEF,
    0xBD,
)


@given(st.lists(st.sampled_from(HARD_BYTES), max_size=80))
@example([0xEF, 0xBF, 0xBD] * 20)
@example([0x80] * 40)
@settings(deadline=None, max_examples=300)
def test_pieces_equal_the_whole_for_broken_utf8(raw: list[int]) -> None:
    token_ids = [TOKEN_OF[byte] for byte in raw]
    expected = decode(token_ids)
    assert "".join(pieces_of([[t] for t in token_ids])) == expected
    assert expected == bytes(raw).decode("utf-8", errors="replace")


@given(st.text(max_size=60))
@settings(deadline=None)
def test_text_streams_without_replacement_marks(text: str) -> None:
    token_ids = [TOKEN_OF[byte] for byte in text.encode("utf-8", errors="ignore")]
    pieces = pieces_of([[t] for t in token_ids])
    assert "".join(pieces) == text.encode("utf-8", errors="ignore").decode()
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    token_ids = [TOKEN_OF[byte] for byte in "a😀b".encode()]
    assert pieces_of([[t] for t in token_ids]) == ["a", "", "", "", "😀", "b", ""]


def test_special_tokens_are_not_text() -> None:
    end = TOKENIZER.get_vocab()["<|im_end|>"]
    assert "".join(pieces_of([[TOKEN_OF[65]], [end], [TOKEN_OF[66]]])) == "AB"


def test_every_step_decodes_a_bounded_window() -> None:
    longest = 0

    def measured(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return decode(token_ids)

    detokenizer = Detokenizer(measured)
    for raw in (b"plain text " * 50, b"\x80" * 500, b"\xe2\x82" * 300, "€😀".encode() * 100):
        for byte in raw:
            detokenizer.push([TOKEN_OF[byte]])
    assert longest <= 2 * (MAX_PENDING_TOKENS + 1)
