"""Stop strings are found across borders, never leaked, and hold back no more than they must."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.text.assembler import TextAssembler
from services.router.text.stop_strings import StopStrings
from tests.unit.router.vocabulary import byte_level_bpe

TOKENIZER = byte_level_bpe()


def decode(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(token_ids), skip_special_tokens=True)


def run(stop: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    finder = StopStrings(stop)
    out = []
    for piece in pieces:
        text, is_stopped = finder.push(piece)
        out.append(text)
        if is_stopped:
            return "".join(out), True
    return "".join([*out, finder.flush()]), False


@pytest.mark.parametrize(
    ("stop", "pieces", "expected", "is_stopped"),
    [
        pytest.param(["END"], ["on", "e END two"], "one ", True, id="inside a piece"),
        pytest.param(["END"], ["one E", "N", "D two"], "one ", True, id="across pieces"),
        pytest.param(["END"], ["one E", "N", "X"], "one ENX", False, id="false start"),
        pytest.param(["END"], ["one EN"], "one EN", False, id="held back until the end"),
        pytest.param(["aab"], ["aa", "ab"], "a", True, id="overlapping start"),
        pytest.param(["abcd", "bc"], ["abcd"], "a", True, id="first complete wins"),
        pytest.param(["bc", "abc"], ["abc"], "", True, id="of two ending together the longer"),
        pytest.param([], ["any", "thing"], "anything", False, id="none"),
        pytest.param(["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", True, id="newlines"),
    ],
)
def test_table(stop: list[str], pieces: list[str], expected: str, is_stopped: bool) -> None:
    assert run(stop, pieces) == (expected, is_stopped)


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(1, 5), max_size=30),
)
@settings(deadline=None, max_examples=300)
def test_result_does_not_depend_on_the_pieces(stop: list[str], text: str, sizes: list[int]) -> None:
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    assert run(stop, pieces) == run(stop, list(text)) == run(stop, [text])
    given_out, is_stopped = run(stop, pieces)
    assert text.startswith(given_out)
    assert not any(s in given_out for s in stop)
    assert is_stopped == any(s in text for s in stop)


@given(st.text("ab", min_size=1, max_size=4), st.text("abc", max_size=30))
@settings(deadline=None)
def test_only_a_possible_start_is_held_back(stop: str, text: str) -> None:
    finder = StopStrings([stop])
    given_out = ""
    for index, character in enumerate(text):
        piece, is_stopped = finder.push(character)
        given_out += piece
        if is_stopped:
            return
        held = text[len(given_out) : index + 1]
        assert len(held) < len(stop) and stop.startswith(held)


def test_tokens_after_the_stop_string_do_not_count() -> None:
    assembler = TextAssembler(decode, ["lo w"])
    token_ids = TOKENIZER.encode("hello world").ids
    text = assembler.push(token_ids)
    assert (text, assembler.stopped) == ("hel", True)
    assert assembler.num_tokens == 2 < len(token_ids)
    assert assembler.flush() == ""


def test_flush_may_find_a_stop_string_or_give_out_the_rest() -> None:
    half = TOKENIZER.encode("€").ids[:1]
    assembler = TextAssembler(decode, ["�"])
    assert assembler.push(half) == ""
    assert assembler.flush() == "" and assembler.stopped
    assembler = TextAssembler(decode, ["llx"])
    assert assembler.push(TOKENIZER.encode("hell").ids) == "he"
    assert assembler.flush() == "ll" and not assembler.stopped
