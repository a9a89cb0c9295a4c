"""What ptxas says about the kernels: read, printed, and refused where a kernel uses local memory."""

from __future__ import annotations

import pytest

import cmake_ninja
import compile_times
import report

PTXAS = """\
csrc/sm80/forward.cuh(12): warning #177-D: variable "x" was declared but never referenced
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function '_ZN9flash_ext4sm8014forward_kernelILi128EEEvv' for 'sm_80'
ptxas info    : Function properties for _ZN9flash_ext4sm8014forward_kernelILi128EEEvv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 20.907 ms
ptxas info    : Compiling entry function '_ZN9flash_ext4sm8014forward_kernelILi128EEEvv' for 'sm_90'
ptxas info    : Function properties for _ZN9flash_ext4sm8014forward_kernelILi128EEEvv
    24 bytes stack frame, 16 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 24 bytes cumulative stack size
ptxas info    : Function properties for _ZN9flash_ext4sm804slowEf
    8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
"""


def test_ptxas_output_is_read_per_kernel_and_architecture() -> None:
    kernels, messages = report.parse_ptxas(PTXAS)
    name = "_ZN9flash_ext4sm8014forward_kernelILi128EEEvv"
    assert kernels == [
        report.KernelReport(name, "sm_80", 168, 1024, 0, 0, 0),
        report.KernelReport(name, "sm_90", 255, 0, 24, 16, 20),
        report.KernelReport("_ZN9flash_ext4sm804slowEf", "sm_90", 0, 0, 8, 0, 0),
    ]
    assert messages == PTXAS.splitlines()[0] + "\n"


def test_local_memory_is_named_with_kernel_and_architecture() -> None:
    kernels, _ = report.parse_ptxas(PTXAS)
    found = report.problems("a_unit", [kernel.to_dict() for kernel in kernels])
    assert len(found) == 2
    assert found[0].startswith(
        "a_unit: forward_kernel for sm_90 uses local memory: 24 bytes stack frame, 16 bytes spill"
    )
    assert found[1].startswith("a_unit: slow for sm_90 uses local memory: 8 bytes stack frame")


@pytest.mark.parametrize(
    ("mangled", "name"),
    [("_ZN9flash_ext4sm8014forward_kernelILi128EEEvv", "forward_kernel"), ("_Z4fillPfl", "fill"), ("main", "main")],
)
def test_short_names(mangled: str, name: str) -> None:
    assert report.short_name(mangled) == name


def test_the_table_merges_architectures_with_equal_numbers() -> None:
    kernels = [
        report.KernelReport("_Z1kv", arch, registers, 0, 0, spill, 0).to_dict()
        for arch, registers, spill in [("sm_80", 40, 0), ("sm_90", 40, 0), ("sm_120", 48, 8)]
    ]
    lines = report.table(
        [{"unit": "sm80_forward_x", "seconds": 9.84, "cached": False, "bytes": 204800, "kernels": kernels}],
        {"sm80_forward_x": 98304},
    )
    assert [line.split() for line in lines if not line.startswith("-")] == [
        ["kernel", "arch", "registers", "shared", "spills", "CPU", "s", "KB"],
        ["sm80_forward_x", "80", "90", "40", "98304", "0", "9.8", "200"],
        ["sm80_forward_x", "120", "48", "98304", "8"],
        ["sum", "9.8", "200"],
    ]


def test_every_head_dim_of_the_fallback_needs_a_tile_for_the_smallest_gpu() -> None:
    base = {"direction": 0, "dtype": 1, "head_dim": 256, "head_dim_v": 256, "features": 7}
    large = {**base, "name": "large", "shared_memory": 100 * 1024}
    assert report.fallback_problems([large, {**base, "name": "small", "shared_memory": 99 * 1024}]) == []
    assert report.fallback_problems([large, {**base, "name": "other", "features": 3, "shared_memory": 1}]) == [
        "large is the smallest tile of its head dims and needs 102400 bytes of shared memory; one of at most 101376 is "
        "required, for the GPUs that have no more (8.6, 8.9, 12.0)"
    ]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("@3/14@sm80_unit", "[ 3/14] sm80_unit  9.8 s"),
        ("@3/14@sm80_failed", "[ 3/14] sm80_failed"),
        (
            "@4/14@Building CXX object CMakeFiles/flash_ext_sm80.dir/csrc/api/abi.cpp.o",
            "[ 4/14] flash_ext_sm80: abi.cpp",
        ),
        ("@14/14@Linking CXX shared library /b/sm80/libflash_ext_sm80.so", "[14/14] link libflash_ext_sm80.so"),
        ('@5/5@Linking CXX shared module "/a b/_C.so"', "[5/5] link _C.so"),
        ("@0/2@Re-checking globbed directories...", None),
        ("ninja: Entering directory `/b'", None),
        ("ninja: error: loading 'build.ninja'", "ninja: error: loading 'build.ninja'"),
        ("csrc/x.cu(3): error: no", "csrc/x.cu(3): error: no"),
    ],
)
def test_progress_lines(line: str, shown: str | None) -> None:
    assert cmake_ninja.progress_line(line, lambda step: "9.8 s" if step == "sm80_unit" else "") == shown


def test_compile_times_are_summed_per_path_and_sorted() -> None:
    def unit(name: str, seconds: float) -> dict[str, object]:
        kernels = [report.KernelReport("_Z1kv", arch, 40, 0, 0, 0, 0).to_dict() for arch in ("sm_80", "sm_90")]
        return {"unit": name, "seconds": seconds, "cached": False, "bytes": 2048, "kernels": kernels}

    lines = compile_times.table({"sm80": [unit("one", 1.5), unit("two", 10.0)], "sm90": [unit("three", 4.0)]})
    assert lines[2:5] == ["| sm80 | 2 | 12 | 4 |", "| sm90 | 1 | 4 | 2 |", "| all | 3 | 16 | 6 |"]
    assert [line.split(" | ")[0] for line in lines[8:]] == ["| two", "| three", "| one"]
    assert lines[8] == "| two | 10.0 | 2 | 40 (80), 40 (90) |"
