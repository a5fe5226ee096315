import logging
import os
from pathlib import Path

import pytest

import kernels
from kernels.native.build import BuildError, build_library
from kernels.native.kernels import NativeKernels
from kernels.reference import ReferenceKernels


def test_a_cpu_gets_the_native_kernels(cache_dir: Path) -> None:
    assert isinstance(kernels.select("cpu", 1, cache_dir), NativeKernels)


def test_a_library_is_compiled_once(cache_dir: Path) -> None:
    library = build_library(cache_dir)
    built_at = library.stat().st_mtime_ns
    assert build_library(cache_dir) == library
    assert library.stat().st_mtime_ns == built_at
    assert list(cache_dir.iterdir()) == [library]


def test_without_a_compiler_the_reference_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.WARNING, logger="kernels"):
        chosen = kernels.select("cpu", 1, tmp_path)
    assert isinstance(chosen, ReferenceKernels)
    assert "no C++ compiler" in caplog.text


def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BuildError, match=r"g\+\+ failed: out of luck"):
        build_library(tmp_path)


def test_a_folder_that_cannot_be_written_falls_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    assert isinstance(kernels.select("cpu", 1, occupied / "kernels"), ReferenceKernels)
    assert "cannot write" in caplog.text


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="abacus"):
        kernels.select("abacus", 1)
