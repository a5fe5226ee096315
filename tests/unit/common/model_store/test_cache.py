"""One build however many ask, and never a half-written folder under the final name."""

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from services.common.errors import ConfigError
from services.common.model_store import resolve
from services.common.model_store.cache import publish_once
from services.common.model_store.folder import REQUIRED_FILES, missing_files
from tests.unit.common.model_store.conftest import WriteGguf


def fill(folder: Path) -> None:
    for name in (*REQUIRED_FILES, "model.safetensors"):
        (folder / name).write_text("{}")


def silently(line: str) -> None:
    """A progress that shows nothing."""


def test_a_second_caller_waits_for_the_first_and_builds_nothing(tmp_path: Path) -> None:
    target = tmp_path / "models" / "tiny"
    is_building, may_finish = threading.Event(), threading.Event()

    def slow_build(folder: Path) -> None:
        is_building.set()
        assert may_finish.wait(30)
        fill(folder)

    def never(folder: Path) -> None:
        raise AssertionError("built twice")

    def on_progress(line: str) -> None:
        assert "waiting" in line
        may_finish.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(publish_once, target, slow_build, silently)
        assert is_building.wait(30)
        second = threads.submit(publish_once, target, never, on_progress)
        assert first.result(30) == second.result(30) == target
    assert not missing_files(target)


def _resolve_in_process(
    source: str, cache_dir: Path, start: threading.Barrier, record: Callable[[object], None]
) -> None:
    lines: list[str] = []
    start.wait(60)
    folder = resolve(source, cache_dir, lines.append)
    record((str(folder), any(line.startswith("reading") for line in lines)))


def test_two_processes_convert_once(write_gguf: WriteGguf, tmp_path: Path) -> None:
    source = str(write_gguf())
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    results = context.Queue()
    processes = [
        context.Process(
            target=_resolve_in_process, args=(source, tmp_path / "cache", start, results.put)
        )
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert answers[0][0] == answers[1][0]
    assert sorted(has_converted for _, has_converted in answers) == [False, True]
    assert not missing_files(Path(answers[0][0]))


def test_a_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "tiny"

    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        publish_once(target, fail, silently)
    assert [path.name for path in tmp_path.iterdir()] == [".tiny.lock"]
    assert publish_once(target, fill, silently) == target


def test_leftovers_of_a_killed_build_and_damage_are_replaced(tmp_path: Path) -> None:
    target = tmp_path / "tiny"
    for path in (target, tmp_path / ".tiny.partial"):
        path.mkdir()
        (path / "garbage").touch()
    publish_once(target, fill, silently)
    assert not missing_files(target)
    assert not (target / "garbage").exists()


def test_an_unwritable_cache_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write the model cache"):
        publish_once(tmp_path / "file" / "tiny", fill, silently)
