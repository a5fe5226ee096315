"""The C++ kernels, built once for all of these tests."""

from pathlib import Path

import pytest

from kernels.native.kernels import NativeKernels


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def native(cache_dir: Path) -> NativeKernels:
    return NativeKernels(num_threads=2, cache_dir=cache_dir)
