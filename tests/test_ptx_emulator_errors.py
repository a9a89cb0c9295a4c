"""What the emulator does not know or cannot find is one clear error, never a crash or a silent no-op."""

from __future__ import annotations

import ctypes
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ptx_emulator import build
from ptx_emulator.device_arrays import FLOAT32, aligned_array, tensor_map
from ptx_emulator.harness import LaunchError, UnitKernels, emulator_options

# The first test of a run may have to compile the emulator.
pytestmark = [
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc"),
    pytest.mark.timeout(600),
]

INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONFIGURATION, INVALID_DEVICE_FUNCTION, INVALID_PTX = 1, 2, 9, 98, 218
UNITS = {"sm80": ("entry.cu", "80", "9.0"), "sm90": ("entry_sm90.cu", "90a", "9.0")}
UNITS["sm100"] = ("entry_sm100.cu", "100a", "10.0")


@pytest.fixture(scope="module")
def kernels() -> UnitKernels:
    """The unit kernels, linked with the emulator."""
    return UnitKernels()


@pytest.fixture(scope="module")
def sm90_kernels() -> UnitKernels:
    """Those of sm90."""
    return UnitKernels(*UNITS["sm90"])


def launch_error(kernels: UnitKernels) -> LaunchError:
    """The error of a launch of `vector_add`."""
    values = np.zeros(32, np.float32)
    with pytest.raises(LaunchError) as info:
        kernels.launch("vector_add", 1, 32, values, values, values.copy(), 32)
    return info.value


def edited(kernels: UnitKernels, folder: Path, kernel: str, old: str, new: str) -> UnitKernels:
    """The library with the first ``old`` of a kernel's PTX, its head included, replaced."""

    def edit(text: str) -> str:
        place = text.index(old, text.index(f".entry {kernel}"))
        return text[:place] + new + text[place + len(old) :]

    return kernels.with_ptx(folder, edit)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add.f32", "frobnicate.f32", "unknown opcode: opcode 'frobnicate.f32'"),
        ("add.f32", "add.quick.f32", "modifier '.quick' is not supported"),
        ("ld.global.f32", "ld.global.sideways.f32", "modifier '.sideways' is not supported"),
        ("ld.global.f32", "ld.global.f64", "the register is narrower than the memory element"),
        ("ld.global.f32", "ld.global.f32 %%", "PTX line"),
        ("ret;", "bra NOWHERE;", "no label 'NOWHERE'"),
        ("vector_add_param_0", "vector_add_param_9", "unknown symbol 'vector_add_param_0'"),
        ("%tid.x", "%tide.x", "unknown register '%tide.x'"),
        ("ret;", "setp.lt.f32;", "too few operands"),
        ("ret;", "mov.b32 {}, 0;", "do not make up the type"),
        ("ret;", "brx.idx;", "brx without a table"),
        ("ret;", "mov.b32 " + "{" * 100_000, "nested too deeply"),
        ("ret;", "setmaxnreg.inc.sync.aligned.u32 264;", "a multiple of 8 from 24 to 256"),
        (".reg .pred", ".reg .pred %q<2000000000>; .reg .pred", "expected a number up to"),
        (".reg .pred", ".shared .align 0 .b8 s[4]; .reg .pred", "an alignment of 0"),
        (".reg .pred", ".shared .align 8 .b8 s[4000000]; .reg .pred", "bytes of shared memory"),
        (".reg .pred", ".local .align 8 .b8 s[600000]; .reg .pred", "bytes of local memory per thread"),
        (".param .u64 ", ".param .align 8 .b8 p[40000], .param .u64 ", "exceed 32764 bytes"),
    ],
)
def test_bad_ptx(kernels: UnitKernels, tmp_path: Path, old: str, new: str, message: str) -> None:
    """Unknown opcodes, modifiers, labels and symbols, and sizes that no GPU has, fail when the kernel is loaded."""
    error = launch_error(edited(kernels, tmp_path, "vector_add", old, new))
    assert error.code == INVALID_PTX
    assert message in str(error)
    assert "PTX line" in str(error) or "in kernel" in str(error) or "kernel vector_add" in str(error)


def entries(kernels: UnitKernels) -> dict[str, tuple[Path, str]]:
    """The PTX file of each kernel by mangled name, and the name that the test's entry function knows it by."""
    names = {}
    for mangled, ptx in build.read_index(kernels.file).items():
        length = re.match(r"_Z(\d+)", mangled)
        begin = length.end() if length else 0
        names[mangled] = (ptx, mangled[begin : begin + int(length[1])] if length else mangled)
    return names


def load_errors(kernels: UnitKernels, folder: Path, edit: Callable[[str, str], str]) -> list[tuple[str, LaunchError]]:
    """Load each kernel from a text of its own, edit(text, mangled name): an error, or that of its empty grid."""
    folder.mkdir()
    copy = folder / kernels.file.name
    shutil.copy(kernels.file, copy)
    lines = kernels.file.with_suffix(".ptx_index").read_text(encoding="utf-8").splitlines()[:1]  # compute_capability
    for mangled, (ptx, name) in entries(kernels).items():
        (folder / f"{name}.ptx").write_text(edit(ptx.read_text(encoding="utf-8"), mangled), encoding="utf-8")
        lines.append(f"{mangled}\t{name}.ptx")
    copy.with_suffix(".ptx_index").write_text("\n".join(lines) + "\n", encoding="utf-8")
    loaded = UnitKernels(library_file=copy)
    errors = []
    for _, name in entries(kernels).values():
        with pytest.raises(LaunchError) as info:
            loaded.launch(name, 0, 32, *[0] * 16)
        errors.append((name, info.value))
    return errors


@pytest.mark.parametrize("part", range(4))
def test_truncated_ptx(kernels: UnitKernels, tmp_path: Path, part: int) -> None:
    """A text that stops anywhere: an error with its line, or, at the end of a statement, no such kernel."""
    rng = random.Random(part)

    def edit(text: str, mangled: str) -> str:
        begin = text.index(f".entry {mangled}") + len(f".entry {mangled}")
        return text[: rng.randrange(begin, text.index("\n}", begin) + 1)]

    for name, error in load_errors(kernels, tmp_path / "inside", edit):
        assert error.code == INVALID_PTX and "PTX line" in str(error), (name, str(error))
    for name, error in load_errors(kernels, tmp_path / "anywhere", lambda text, _: text[: rng.randrange(len(text))]):
        assert error.code in (INVALID_PTX, INVALID_DEVICE_FUNCTION, INVALID_CONFIGURATION), (name, str(error))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("unit", UNITS)
def test_damaged_ptx(unit: str, tmp_path: Path, seed: int) -> None:
    """A word of a kernel dropped, doubled, or replaced by another: refused, or a kernel that can be loaded."""
    kernels = UnitKernels(*UNITS[unit])
    rng = random.Random(seed)
    word = re.compile(r"[\w.%$]+(?:::\w[\w.]*)*|[^\s\w]")

    def edit(text: str, mangled: str) -> str:
        begin = text.index(f".entry {mangled}") + len(f".entry {mangled}")
        end = text.index("\n}", begin)
        words = [match for match in word.finditer(text, begin, end) if "\n" not in match[0]]
        old = rng.choice(words)
        new = rng.choice(["", old[0] * 2, f"{old[0]} {old[0]}", rng.choice(words)[0], "{", "}", "[", "-1", "%r1", "0f"])
        return text[: old.start()] + new + text[old.end() :]

    for name, error in load_errors(kernels, tmp_path / "damaged", edit):
        assert error.code in (INVALID_PTX, INVALID_DEVICE_FUNCTION, INVALID_CONFIGURATION), (name, str(error))


@pytest.mark.parametrize("missing", [".ptx_index", ".ptx"])
def test_missing_files(kernels: UnitKernels, tmp_path: Path, missing: str) -> None:
    """Without its index, or without a PTX file of the index, a library says which file it looked for."""
    folder = tmp_path / "copied"
    shutil.copytree(kernels.file.parent, folder)
    (file,) = folder.glob(f"*{missing}")
    file.unlink()
    error = launch_error(UnitKernels(library_file=folder / kernels.file.name))
    assert error.code == INVALID_DEVICE_FUNCTION
    assert f"cannot read {file}" in str(error)


@pytest.mark.parametrize(
    ("old", "new", "block", "message"),
    [
        (")\n{", ")\n.maxntid 64\n{", 128, "128 threads per CTA, the kernel was compiled for at most 64"),
        (")\n{", ")\n.reqntid 64, 1, 1\n{", 32, "the kernel requires 64 x 1 x 1"),
        (")\n{", ")\n{ .shared .b8 s[49156];", 32, "49156 bytes of static shared memory"),
        (")\n{", ")\n{", 1025, "a block of 1025 x 1 x 1 threads"),
    ],
)
def test_kernel_that_the_launch_does_not_fit(
    kernels: UnitKernels, tmp_path: Path, old: str, new: str, block: int, message: str
) -> None:
    """Threads and shared memory that the kernel declares, or the device has."""
    values = np.zeros(1, np.float32)
    changed = edited(kernels, tmp_path, "vector_add", old, new)
    with pytest.raises(LaunchError) as info:
        changed.launch("vector_add", 1, block, values, values, values, 1)
    assert info.value.code == INVALID_CONFIGURATION
    assert message in str(info.value)


@pytest.mark.parametrize("shared", [48 * 1024 + 1, 2**32, 2**32 + 64, 2**63])
def test_dynamic_shared_memory_that_was_not_asked_for(kernels: UnitKernels, shared: int) -> None:
    """More than 48 KB need cudaFuncSetAttribute; sizes beyond 32 bits are not cut off."""
    values = np.zeros(1, np.float32)
    with pytest.raises(LaunchError) as info:
        kernels.launch("vector_add", 1, 32, values, values, values, 1, shared=shared)
    assert info.value.code == INVALID_CONFIGURATION
    assert f"{shared} bytes of dynamic shared memory" in str(info.value)


@pytest.mark.parametrize(
    ("cluster", "grid", "cc", "message"),
    [
        ("16, 1, 1", 16, "9.0", "a cluster of 16 CTAs without cudaFuncAttributeNonPortableClusterSizeAllowed"),
        ("32, 1, 1", 32, "9.0", "a cluster of 32 CTAs without"),
        ("4, 1, 1", 6, "9.0", "a grid of 6 x 1 x 1 in clusters of 4 x 1 x 1"),
        ("2, 0, 1", 6, "9.0", "in clusters of 2 x 0 x 1"),
        ("2, 1, 1", 2, "8.0", "clusters need compute capability 9.0"),
    ],
)
def test_clusters_beyond_the_device(
    sm90_kernels: UnitKernels, tmp_path: Path, cluster: str, grid: int, cc: str, message: str
) -> None:
    """Too many CTAs, a grid that is no multiple, a device without clusters."""

    def edit(text: str) -> str:
        return re.sub(r"\.reqnctapercluster 2(, 1, 1)?", f".reqnctapercluster {cluster}", text)

    values, out = np.zeros(128, np.float32), np.zeros((grid, 128), np.float32)
    with emulator_options(cc=cc), pytest.raises(LaunchError) as info:
        sm90_kernels.with_ptx(tmp_path, edit).launch("pair_exchange", grid, 128, values, out, 0)
    assert info.value.code == INVALID_CONFIGURATION
    assert message in str(info.value)


def test_parameters_that_are_not_there(kernels: UnitKernels) -> None:
    """PTX that takes more, or larger, arguments than the caller has: an error as long as they lie in no memory."""
    ones = (ctypes.c_uint32 * 3)(1, 1, 1)
    code = kernels.library.flash_ext_test_launch(b"vector_add", ones, ones, ctypes.c_uint64(0), (ctypes.c_void_p * 4)())
    message = kernels.library.flash_ext_test_error(code).decode()
    assert code == INVALID_VALUE
    assert "kernel vector_add: parameter 0 of 4 (8 bytes) cannot be read" in message


@pytest.mark.parametrize("size", [2**35, 2**60, 2**64 - 1])
def test_allocation_beyond_the_device(kernels: UnitKernels, size: int) -> None:
    """cudaMalloc of more than the device has, up to sizes that overflow when they are rounded up."""
    allocate = kernels.library.flash_ext_test_allocate
    assert allocate(ctypes.c_uint64(1 << 20)) == 0
    code = allocate(ctypes.c_uint64(size))
    assert code == OUT_OF_MEMORY
    assert f"cudaMalloc of {size} bytes" in kernels.library.flash_ext_test_error(code).decode()


def test_host_calls_with_wild_pointers(kernels: UnitKernels) -> None:
    """cudaMemset of memory that is not there, and the process goes on."""
    clear = kernels.library.flash_ext_test_clear
    for address in (None, 8, 2**46):
        code = clear(ctypes.c_void_p(address), ctypes.c_uint64(64))
        assert code == INVALID_VALUE
        assert "cudaMemset of 64 bytes touches" in kernels.library.flash_ext_test_error(code).decode()
    values = np.ones(16, np.float32)
    assert clear(ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(64)) == 0
    assert not values.any()


def test_something_else_than_a_tensor_map(sm90_kernels: UnitKernels) -> None:
    """A kernel that is given bytes which no encoder wrote, or an address that no map can have, stops with an error."""
    tensor, plain = aligned_array(np.zeros((16, 16), np.float32)), aligned_array(np.zeros(256, np.float32))
    good = tensor_map(sm90_kernels, tensor, FLOAT32, (16, 16))
    assert not isinstance(good, int)
    zeros = aligned_array(np.zeros(128, np.uint8))
    with pytest.raises(LaunchError, match="there is no tensor map at"):
        sm90_kernels.launch("box_and_back", 1, 256, zeros, good, plain, 0, 0, 0, 0)
    with pytest.raises(LaunchError, match="must be a multiple of 64"):
        sm90_kernels.launch("box_and_back", 1, 256, aligned_array(np.zeros(129, np.uint8))[1:], good, plain, 0, 0, 0, 0)


def test_missing_kernel(kernels: UnitKernels, tmp_path: Path) -> None:
    """A kernel that the index does not name, or that its PTX file does not hold."""
    error = launch_error(kernels.with_ptx(tmp_path, lambda text: text.replace("vector_add", "vector_sub")))
    assert error.code == INVALID_DEVICE_FUNCTION
    assert "vector_add" in str(error)


def test_a_copied_folder_has_its_own_ptx(kernels: UnitKernels, tmp_path: Path) -> None:
    """The index names PTX from where it lies itself, so that a checkout may be moved or copied."""
    copied = tmp_path / "copied"
    shutil.copytree(kernels.file.parent, copied)
    library = copied / kernels.file.name
    assert str(kernels.file.parent) not in library.with_suffix(".ptx_index").read_text(encoding="utf-8")
    (ptx,) = set(build.read_index(library).values())
    assert ptx.parent.resolve() == copied.resolve()
    text = ptx.read_text(encoding="utf-8")
    place = text.index("add.f32", text.index(".entry vector_add"))
    ptx.write_text(text[:place] + "frobnicate.f32" + text[place + len("add.f32") :], encoding="utf-8")
    assert "unknown opcode: opcode 'frobnicate.f32'" in str(launch_error(UnitKernels(library_file=library)))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("schedule", "sometimes"), ("seed", "many"), ("sm_count", "0"), ("cc", "9.9"), ("remove", "100000")],
)
def test_bad_environment(kernels: UnitKernels, variable: str, value: str) -> None:
    """A value that means nothing is refused by name."""
    with emulator_options(**{variable: value}):
        error = launch_error(kernels)
    assert error.code == INVALID_CONFIGURATION
    assert value in str(error)
