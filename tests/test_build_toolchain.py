"""What a build is asked for by the environment, and the tools it finds."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from helpers.processes import run

import build_backend
import toolchain

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("value", "paths"),
    [("none", ()), ("sm90", ("sm90",)), ("sm100, sm80", ("sm80", "sm100")), ("sm80,sm90,sm100", toolchain.PATHS)],
)
def test_paths_are_read_in_a_fixed_order(value: str, paths: tuple[str, ...]) -> None:
    assert toolchain.read_options({"FLASH_EXT_PATHS": value}).paths == paths


@pytest.mark.parametrize(
    ("gpus", "paths"),
    [
        ([(8, 6)], ("sm80",)),
        ([(9, 0)], ("sm80", "sm90")),
        ([(10, 3), (9, 0)], ("sm80", "sm90", "sm100")),
        ([(12, 0)], ("sm80",)),
        ([(7, 5)], ()),
        ([], ()),
    ],
)
def test_native_is_what_the_visible_gpus_use(
    monkeypatch: pytest.MonkeyPatch, gpus: list[tuple[int, int]], paths: tuple[str, ...]
) -> None:
    monkeypatch.setattr(toolchain, "visible_gpus", lambda: gpus)
    assert toolchain.read_options({}).paths == (paths or toolchain.PATHS)
    if paths:
        assert toolchain.read_options({"FLASH_EXT_PATHS": "native"}).paths == paths
    else:
        with pytest.raises(toolchain.BuildError, match="FLASH_EXT_PATHS=native, but no GPU"):
            toolchain.read_options({"FLASH_EXT_PATHS": "native"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FLASH_EXT_PATHS", "sm75"),
        ("FLASH_EXT_PATHS", "sm80,"),
        ("FLASH_EXT_PATHS", "sm80,none"),
        ("FLASH_EXT_JOBS", "0"),
        ("FLASH_EXT_JOBS", "two"),
        ("FLASH_EXT_LINEINFO", "yes"),
    ],
)
def test_an_unknown_option_value_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(toolchain.BuildError, match=f"^{name}='{re.escape(value)}'.* allowed are "):
        toolchain.read_options({"FLASH_EXT_PATHS": "none", name: value})


def test_options_from_the_environment() -> None:
    options = toolchain.read_options({"FLASH_EXT_PATHS": "none", "FLASH_EXT_JOBS": "7", "FLASH_EXT_LINEINFO": "1"})
    assert options == toolchain.Options(paths=(), jobs=7, lineinfo=True)
    assert toolchain.read_options({"FLASH_EXT_PATHS": "none"}).jobs >= 1


def test_setup_says_in_one_line_what_is_wrong() -> None:
    result = run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, FLASH_EXT_PATHS="sm81")
    assert result.returncode != 0
    assert result.stderr.strip().splitlines()[-1].startswith("flash_ext: FLASH_EXT_PATHS='sm81': 'sm81' is unknown")
    assert "Traceback" not in result.stderr


# ---------------------------------------------------------------------------------------------------------------------
# FLASH_EXT_PYTHONS.


def fake_python(folder: Path, minor: int, name: str = "cpython", free_threaded: bool = False) -> str:
    """An interpreter that only describes itself."""
    described = {"version": [3, minor], "name": name, "free_threaded": free_threaded}
    described |= {"executable": f"/real/python3.{minor}", "tag": f"{name}-3{minor}", "suffix": f".{name}-3{minor}.so"}
    folder.mkdir(exist_ok=True)
    python = folder / f"python3.{minor}"
    python.write_text(f"#!/bin/sh\ncat <<'END'\n{json.dumps(described)}\nEND\n")
    python.chmod(0o755)
    return str(python)


def test_pythons_by_version_and_by_interpreter(tmp_path: Path) -> None:
    assert toolchain.read_pythons({}) == toolchain.read_pythons({"FLASH_EXT_PYTHONS": " "}) == ()
    fake_python(tmp_path, 10)
    other = fake_python(tmp_path / "other", 13)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FLASH_EXT_PYTHONS": f"{other}, 3.10"}
    pythons = toolchain.read_pythons(environment)
    assert pythons == (
        toolchain.Python("/real/python3.10", (3, 10), "cpython-310", ".cpython-310.so"),
        toolchain.Python("/real/python3.13", (3, 13), "cpython-313", ".cpython-313.so"),
    )
    assert toolchain.requires_python(pythons) == ">=3.10,<3.14,!=3.11.*,!=3.12.*"
    assert toolchain.requires_python(pythons[:1]) == ">=3.10,<3.11"
    assert toolchain.requires_python(()) == ">=3.10"


def test_the_running_python_describes_itself_like_any_other() -> None:
    (python,) = toolchain.read_pythons({"PATH": os.environ["PATH"], "FLASH_EXT_PYTHONS": sys.executable})
    assert python == toolchain.running_python()
    assert python.suffix == sysconfig.get_config_var("EXT_SUFFIX") and python.version == sys.version_info[:2]


@pytest.mark.parametrize(
    ("name", "minor", "implementation", "free_threaded", "says"),
    [
        ("3.9", 9, "cpython", False, "python3.9 is cpython 3.9; needed is CPython 3.10 or newer"),
        ("3.11", 11, "pypy", False, "python3.11 is pypy 3.11; needed is CPython"),
        ("3.13", 13, "cpython", True, "python3.13 is cpython 3.13 without the GIL; needed is CPython"),
        ("3.99", 10, "cpython", False, "python3.99 does not run (it is not there); allowed are versions"),
        ("3.10,3.10", 10, "cpython", False, "names Python 3.10 twice"),
    ],
)
def test_a_python_that_cannot_be_built_for_is_named(
    tmp_path: Path, name: str, minor: int, implementation: str, free_threaded: bool, says: str
) -> None:
    fake_python(tmp_path, minor, implementation, free_threaded)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FLASH_EXT_PYTHONS": name}
    with pytest.raises(toolchain.BuildError, match=rf"^FLASH_EXT_PYTHONS:? .*{re.escape(says)}"):
        toolchain.read_pythons(environment)


def test_an_interpreter_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "python3.12"
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(toolchain.BuildError, match=rf"^FLASH_EXT_PYTHONS: {broken} does not run \(.*status 127"):
        toolchain.read_pythons({"PATH": os.environ["PATH"], "FLASH_EXT_PYTHONS": str(broken)})


# ---------------------------------------------------------------------------------------------------------------------
# Compilers.


def fake_nvcc(root: Path, version: str) -> str:
    """An nvcc that only tells its version."""
    nvcc = root / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version[:4]}, V{version}'\n")
    nvcc.chmod(0o755)
    return str(nvcc)


@pytest.fixture
def no_toolkit_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides a CUDA toolkit that this environment may hold as a package (torch for CUDA brings parts of one)."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.usefixtures("no_toolkit_package")
def test_nvcc_comes_from_cuda_home_then_path_then_pypi(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    home = fake_nvcc(tmp_path / "home", "13.1.80")
    on_path = fake_nvcc(tmp_path / "path", "13.0.88")
    pypi = fake_nvcc(tmp_path / "pypi" / "nvidia" / "cu13", "13.0.88")
    environment = {"CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path" / "bin")}
    assert toolchain.find_nvcc(tmp_path / "pypi", environment) == home
    assert toolchain.find_nvcc(tmp_path / "pypi", {"PATH": environment["PATH"]}) == on_path
    assert toolchain.find_nvcc(tmp_path / "pypi", {"PATH": "/nowhere"}) == pypi
    assert toolchain.find_nvcc(None, {"PATH": "/nowhere"}) is None
    assert capfd.readouterr().err == ""


@pytest.mark.usefixtures("no_toolkit_package")
def test_an_older_nvcc_is_passed_over_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    old = fake_nvcc(tmp_path / "old", "12.9.86")
    new = fake_nvcc(tmp_path / "new", "13.0.88")
    assert toolchain.find_nvcc(None, {"CUDA_HOME": str(tmp_path / "old"), "PATH": str(tmp_path / "new/bin")}) == new
    assert f"{old} (from CUDA_HOME, version 12.9.86) is older than 13.0" in capfd.readouterr().err
    assert toolchain.find_nvcc(None, {"CUDA_HOME": str(tmp_path), "PATH": str(tmp_path / "new" / "bin")}) == new
    assert f"CUDA_HOME={tmp_path} has no bin/nvcc" in capfd.readouterr().err


@pytest.mark.usefixtures("no_toolkit_package")
def test_without_nvcc_the_error_says_what_helps(tmp_path: Path) -> None:
    with pytest.raises(toolchain.BuildError) as error:
        toolchain.find_toolchain(False, tmp_path, {"PATH": "/nowhere"})
    for remedy in ("13.0", "CUDA_HOME", "PATH", toolchain.CUDA_REQUIREMENT, "FLASH_EXT_PATHS=none"):
        assert remedy in str(error.value)


@pytest.mark.usefixtures("no_toolkit_package")
@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_the_backend_asks_for_the_toolkit_only_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hook: str
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["setup.py"])
    monkeypatch.delenv("CUDA_HOME", raising=False)

    def required(paths: str, path_variable: str) -> set[str]:
        monkeypatch.setenv("FLASH_EXT_PATHS", paths)
        monkeypatch.setenv("PATH", path_variable)
        return {name for name in getattr(build_backend, hook)() if name in (toolchain.CUDA_REQUIREMENT, "pip")}

    fake_nvcc(tmp_path, "13.0.88")
    assert required("sm80", "/nowhere") == {toolchain.CUDA_REQUIREMENT, "pip"}
    assert required("sm80", str(tmp_path / "bin")) == {"pip"}
    assert required("none", "/nowhere") == set()
    with pytest.raises(SystemExit, match="flash_ext: FLASH_EXT_PATHS='x'"):
        required("x", "/nowhere")


def test_cutlass_path_is_checked_and_enters_the_fingerprint(tmp_path: Path) -> None:
    with pytest.raises(toolchain.BuildError, match="CUTLASS_PATH=.*no include/cutlass/version.h"):
        toolchain.find_cutlass(tmp_path, {"CUTLASS_PATH": str(tmp_path)})
    header = tmp_path / "cutlass" / "include" / "cutlass" / "version.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define CUTLASS_MAJOR 4\n#define CUTLASS_MINOR 2\n#define CUTLASS_PATCH 1\n")
    include, version = toolchain.find_cutlass(tmp_path, {"CUTLASS_PATH": str(tmp_path / "cutlass")})
    assert (include, version.split()[0]) == (str(header.parent.parent), "4.2.1")


def test_a_cutlass_wheel_with_another_hash_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(toolchain.CUTLASS_PREFIX + "cutlass/version.h", "")
        archive.writestr("cutlass_library/library.py", "")
    include = tmp_path / "include"
    with pytest.raises(toolchain.BuildError, match=f"not the pinned {toolchain.CUTLASS_SHA256}"):
        toolchain.unpack_cutlass(wheel, include)
    assert not include.exists()
    toolchain.unpack_cutlass(wheel, include, hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert [str(file.relative_to(include)) for file in include.rglob("*") if file.is_file()] == ["cutlass/version.h"]
