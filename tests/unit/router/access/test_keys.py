"""What a file of keys may say, and that a key is made, hashed and found again."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import ConfigError
from services.router.access.__main__ import main
from services.router.access.keys import ApiKey, KeyLimits, digest_of, find_key, parse_keys

HASH = "sha256:" + "0" * 64


def test_comments_and_empty_lines_are_skipped() -> None:
    keys = parse_keys(f"# name hash\n\n  alice {HASH} tokens_per_minute=5\n")
    assert keys == (ApiKey("alice", bytes(32), KeyLimits(tokens_per_minute=5)),)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice sk-the-key-itself",
        f"alice sha1:{'0' * 40}",
        f"alice {HASH}0",
        f"{HASH} alice",
        f"al/ice {HASH}",
        f"{'a' * 65} {HASH}",
        f"alice {HASH} max_concurrent=0",
        f"alice {HASH} max_concurrent=-1",
        f"alice {HASH} max_concurrent=few",
        f"alice {HASH} max_concurrent",
        f"alice {HASH} max_concurrent=1 max_concurrent=2",
        f"alice {HASH} tokens=1",
        f"bob {HASH}",
        f"other {'sha256:' + '1' * 64}",
    ],
)
def test_a_wrong_line_is_named_and_not_repeated(line: str) -> None:
    text = f"other {HASH}\n# a comment\n{line}\n"
    with pytest.raises(ConfigError, match=r"^line 3: ") as caught:
        parse_keys(text)
    assert "the-key-itself" not in caught.value.message


limits = st.builds(KeyLimits, st.none() | st.integers(1, 10**9), st.none() | st.integers(1, 10**12))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.text(), min_size=1, max_size=5, unique=True), st.data())
def test_every_key_is_found_as_written(keys: list[str], data: st.DataObject) -> None:
    entries = [
        ApiKey(f"key-{number}", digest_of(key), data.draw(limits))
        for number, key in enumerate(keys)
    ]
    read = parse_keys("\n".join(entry.line() for entry in entries))
    assert list(read) == entries
    for key, entry in zip(keys, entries, strict=True):
        assert find_key(read, key) == entry
    assert find_key(read, "".join(keys) + "x") is None


def test_a_new_key_and_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["alice", "--max-concurrent", "8", "--tokens-per-minute", "60000"]) == 0
    line, key = capsys.readouterr()
    (entry,) = parse_keys(line)
    assert (entry.name, entry.limits) == ("alice", KeyLimits(8, 60_000))
    assert find_key([entry], key.strip()) == entry
    assert key.strip() not in line


def test_a_key_from_elsewhere_must_be_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("sk-0123456789abcdefgh\n"))
    assert main(["alice", "--stdin"]) == 0
    line, nothing = capsys.readouterr()
    assert find_key(parse_keys(line), "sk-0123456789abcdefgh") is not None
    assert nothing == ""
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    assert main(["alice", "--stdin"]) == 2
    assert main(["al ice"]) == 2
    assert main(["alice", "--max-concurrent", "0"]) == 2
