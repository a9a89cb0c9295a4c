"""How a unit is compiled: object, PTX, report, manifest. Most of it needs nvcc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes import run

import compile_unit
import report
import toolchain

ROOT = Path(__file__).resolve().parent.parent

HAS_NVCC = toolchain.find_nvcc(ROOT / "build" / "toolchain" / "cuda") is not None
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="no CUDA compiler of version 13.0 or newer")

# 64 values that are indexed at run time: they cannot live in registers.
SPILLING = """
namespace flash_ext {
__global__ void local_memory_kernel(float* data, int index) {
    float values[64];
    for (int i = 0; i < 64; ++i) values[i] = data[i];
    for (int i = 0; i < 64; ++i) values[(index + i * i) % 64] += values[(i * index) % 64];
    data[threadIdx.x] = values[threadIdx.x];
}
}
"""


def compile_source(tree: Path, text: str, ccache: str = "") -> tuple[subprocess.CompletedProcess[str], Path]:
    """Compile a unit as the build does, in a source tree of its own."""
    tools = json.loads(toolchain.find_toolchain(False, ROOT / "build" / "toolchain").to_json())
    (tree / "toolchain.json").write_text(json.dumps({**tools, "ccache": ccache}))
    (tree / "fingerprint.txt").write_text("fixed\n")
    (tree / "unit.cu").write_text(text)
    command = [sys.executable, compile_unit.__file__, "toolchain.json", "--unit", "unit", "--source", "unit.cu"]
    command += [
        "--folder",
        "build/unit",
        "--",
        "-std=c++20",
        "-gencode",
        "arch=compute_80,code=[sm_80,sm_90,compute_80]",
    ]
    command += ["-frandom-seed=unit", "-Xcudafe", "--orig_src_path_name,unit.cu"]
    return run(command, cwd=tree, CCACHE_DIR=str(tree.parent / "ccache")), tree / "build" / "unit"


@needs_nvcc
def test_a_kernel_in_local_memory_is_found(tmp_path: Path) -> None:
    result, folder = compile_source(tmp_path, SPILLING)
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((folder / "report.json").read_text())
    found = report.problems("unit", document["kernels"])
    assert [sentence.split(" uses ")[0] for sentence in found] == [
        "unit: local_memory_kernel for sm_80",
        "unit: local_memory_kernel for sm_90",
    ]
    assert sorted(file.name for file in folder.iterdir()) == ["report.json", "unit.d", "unit.o", "unit.ptx"]
    assert document["bytes"] == (folder / "unit.o").stat().st_size


@needs_nvcc
def test_a_compiler_error_is_shown_and_leaves_no_object(tmp_path: Path) -> None:
    result, folder = compile_source(tmp_path, "__global__ void k() { undeclared(); }")
    assert result.returncode != 0
    assert 'unit.cu(1): error: identifier "undeclared" is undefined' in result.stdout
    assert list(folder.iterdir()) == []


@needs_nvcc
def test_objects_and_ptx_do_not_depend_on_the_folder(tmp_path: Path) -> None:
    # An internal variable: its name would hold a hash of the source's absolute path.
    text = "static __device__ int counter; __global__ void k(int* out) { *out = counter; counter = *out + 1; }"
    folders = []
    for name in ("one", "another/deeper"):
        (tmp_path / name).mkdir(parents=True)
        result, folder = compile_source(tmp_path / name, text)
        assert result.returncode == 0, result.stdout + result.stderr
        folders.append(folder)
    for file in ("unit.o", "unit.ptx"):
        assert (folders[0] / file).read_bytes() == (folders[1] / file).read_bytes()
    assert "counter" in (folders[0] / "unit.ptx").read_text()


def build_small_library(tree: Path) -> Path:
    """The sm80 library with one kernel of the table, built by a copy of the sources, without a compiler cache."""
    for name in ("CMakeLists.txt", "cmake", "csrc", "flash_ext/_version.py"):
        source, copy = ROOT / name, tree / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy)
    table = tree / "csrc" / "kernels.toml"
    head, first, *_ = table.read_text().split("\n[[kernel]]\n")
    table.write_text(f"{head}\n[[kernel]]\n{first}\n".replace('["fp16", "bf16"]', '["fp16"]'))
    code = (
        "import native_build, pathlib, toolchain\n"
        "options = toolchain.Options(('sm80',), 1, False)\n"
        "print(native_build.build_libraries(options, False)['libflash_ext_sm80.so'])\n"
    )
    # Where `make` has put a toolkit from PyPI, as conftest.py finds it: on PATH.
    result = run([sys.executable, "-c", code], cwd=tree, PYTHONPATH=str(tree / "cmake"), CCACHE_DISABLE="1")
    assert result.returncode == 0, result.stdout + result.stderr
    return Path(result.stdout.splitlines()[-1])


@needs_nvcc
@pytest.mark.timeout(600)
def test_a_library_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    libraries = [build_small_library(tmp_path / name) for name in ("one", "another/deeper")]
    assert libraries[0] != libraries[1]
    assert [kernel["name"] for kernel in report.library_kernels(libraries[0])] == [
        "sm80_forward_fp16_d32x32_m128n128_plain"
    ]
    assert libraries[0].read_bytes() == libraries[1].read_bytes()
    assert str(tmp_path).encode() not in libraries[0].read_bytes()


@needs_nvcc
@pytest.mark.skipif(shutil.which("ccache") is None, reason="no ccache")
def test_a_hit_of_the_compiler_cache_makes_the_same_ptx(tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.h").touch()
        text = '#include "part.h"\n' + SPILLING
        result, folder = compile_source(tmp_path / name, text, ccache=shutil.which("ccache") or "")
        assert result.returncode == 0, result.stdout + result.stderr
        results.append((json.loads((folder / "report.json").read_text()), folder))
    (first, fresh), (second, hit) = results
    assert (first["cached"], second["cached"]) == (False, True)
    assert first["kernels"] == second["kernels"]
    assert (fresh / "unit.o").read_bytes() == (hit / "unit.o").read_bytes()
    assert (fresh / "unit.ptx").read_bytes() == (hit / "unit.ptx").read_bytes()
    for name, folder in (("one", fresh), ("two", hit)):
        assert str(tmp_path / name / "part.h") in (folder / "unit.d").read_text().split()


@pytest.mark.parametrize("colon", [" :", ":"], ids=["nvcc", "ccache"])
def test_dependencies_are_the_projects_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, colon: str) -> None:
    monkeypatch.chdir(tmp_path)
    depfile = tmp_path / "unit.d"
    depfile.write_text(
        f"build/unit.o{colon} csrc/unit.cu \\\n    /usr/local/cuda/include/cuda.h \\\n    csrc/params.h\n"
    )
    compile_unit.keep_own_dependencies(depfile, Path("build/unit.o"))
    assert depfile.read_text() == f"{tmp_path}/build/unit.o: {tmp_path}/csrc/unit.cu {tmp_path}/csrc/params.h\n"


def test_ptx_older_than_its_object_is_an_error(tmp_path: Path) -> None:
    folder = tmp_path / "units" / "unit"
    folder.mkdir(parents=True)
    (folder / "unit.ptx").write_text(
        ".visible .entry _Z1kv(\n)\n.weak .entry _Z1jv(\n)\n.entry _Z1iv(\n)\n.func _Z1fv(\n)\n"
    )
    (folder / "unit.o").write_bytes(b"")
    os.utime(folder / "unit.ptx", (100, 100))
    os.utime(folder / "unit.o", (101, 101))
    with pytest.raises(report.ManifestError, match=r"unit\.ptx is older than its object"):
        report.write_manifest(tmp_path, "sm80", "arch=...", {"unit": "unit.cu"}, [])
    os.utime(folder / "unit.o", (100, 100))
    report.write_manifest(tmp_path, "sm80", "arch=...", {"unit": "unit.cu"}, ["abi.o"])
    assert json.loads((tmp_path / "manifest.json").read_text()) == {
        "path": "sm80",
        "gencode": "arch=...",
        "units": [
            {
                "unit": "unit",
                "source": "unit.cu",
                "kernels": ["_Z1kv", "_Z1jv", "_Z1iv"],
                "object": "units/unit/unit.o",
                "ptx": "units/unit/unit.ptx",
            }
        ],
        "host_objects": ["abi.o"],
    }
