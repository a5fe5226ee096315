"""Wrong options and failures end in one clear line."""

from collections.abc import Callable

import pytest

from benchmarks.command import new_parser, run
from services.common.errors import ConfigError


@pytest.mark.parametrize("threads", ["0", "-1", "many"])
def test_a_wrong_number_of_threads_is_refused(
    threads: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        new_parser("decode", None).parse_args([f"--threads={threads}"])
    assert f"'{threads}' is not a number of threads" in capsys.readouterr().err


def test_by_default_every_core_computes() -> None:
    options = new_parser("decode", None).parse_args([])
    assert options.threads >= 1
    assert not options.quick


def _fail(error: BaseException) -> Callable[[list[str]], None]:
    def main(arguments: list[str]) -> None:
        raise error

    return main


def test_the_exit_status_tells_how_it_ended(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda arguments: None) == 0
    assert run(_fail(ConfigError("no such model"))) == 1
    assert capsys.readouterr().err == "no such model\n"
    assert run(_fail(KeyboardInterrupt())) == 130
