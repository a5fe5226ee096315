"""Libraries compiled beforehand: which of them a CPU gets where there is no compiler."""

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.build import BuildError, build_library, find_prebuilt, levels_of, prebuild
from kernels.native.kernels import NativeKernels

V3 = "fpu sse2 avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"
AMX = f"{V4} avx512_bf16 amx_tile amx_bf16 amx_int8"


@pytest.mark.parametrize(
    ("machine", "line", "names"),
    [
        ("x86_64", f"flags\t\t: {AMX}", ["x86-64-amx", "x86-64-v4", "x86-64-v3"]),
        ("x86_64", f"flags\t\t: {V4}", ["x86-64-v4", "x86-64-v3"]),
        ("x86_64", f"flags\t\t: {V3}", ["x86-64-v3"]),
        ("x86_64", f"flags\t\t: {V3.replace('avx2', '')}", []),
        ("aarch64", "Features\t: fp asimd aes", ["armv8"]),
        ("aarch64", f"flags\t\t: {AMX}", []),
        ("riscv64", "isa\t\t: rv64imafdc", []),
        ("x86_64", "", []),
    ],
)
def test_a_cpu_runs_what_its_flags_say_the_fastest_first(
    machine: str, line: str, names: list[str]
) -> None:
    cpu_info = f"processor\t: 0\nmodel name\t: flags and all\n{line}\nbogomips\t: 4200\n"
    assert [level.name for level in levels_of(machine, cpu_info)] == names


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The lowest level of this machine alone, without optimisation, so that it is quick."""
    folder = tmp_path_factory.mktemp("prebuilt")
    lowest = [level for level in build.LEVELS if level.machine == platform.machine()][-1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "LEVELS", tuple(lowest))
        patch.setattr(build, "FLAGS", ("-std=c++17", "-O0", "-fPIC"))
        assert [path.parent for path in prebuild(folder)] == [folder]
        yield folder


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_a_prebuilt_library_is_used(prebuilt: Path) -> None:
    (library,) = prebuilt.iterdir()
    assert build_library(prebuilt) == library
    assert NativeKernels(1, prebuilt).library is not None


@pytest.mark.usefixtures("no_compiler")
def test_without_a_fitting_library_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"no C\+\+ compiler: .*, and .* has none for this CPU"):
        build_library(tmp_path)


@pytest.mark.usefixtures("no_compiler")
def test_a_library_of_other_sources_is_not_used(
    prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DNEWER"))
    assert find_prebuilt(prebuilt, build.levels_of_this_cpu()) is None
