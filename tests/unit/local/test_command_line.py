"""What is typed wrong is said in one line."""

import pytest

from services.local.__main__ import _parse


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--instances", "abc"], "argument --instances: 'abc' is not a whole number"),
        (["demo", "--kv-blocks", ""], "argument --kv-blocks: '' is not a whole number"),
        (["up", "--port", "8k"], "argument --port: '8k' is not a whole number"),
        (["up", "--gmanagers", "two"], "argument --gmanagers: 'two' is not a whole number"),
        (["status", "--request", "x"], "argument --request: 'x' is not the id of a request"),
        (["status", "--request", "-1"], "argument --request: '-1' is not the id of a request"),
    ],
)
def test_a_number_that_is_none_is_one_clear_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        _parse(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"{line}\n"
