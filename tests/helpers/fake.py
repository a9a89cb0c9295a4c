"""A make-believe path library, and tests that run in a process of their own with it.

The library is the real csrc/api over a CUDA runtime and kernels of tests/fake_library: the kernels run on the host and
copy data through the views they are given, so the binding, the choice of a kernel and the dispatcher can be tested on a
machine without a GPU or a CUDA toolkit. flash_ext reads its environment once, hence the processes.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FakeRuntime", "in_process", "library_dir"]

_ROOT = Path(__file__).resolve().parents[2]
_COMPUTE_CAPABILITY = {"sm80": "8.0", "sm90": "9.0", "sm100": "10.0"}


# ---------------------------------------------------------------------------------------------------------------------
# The library.


def _sources() -> list[Path]:
    return sorted([*(_ROOT / "csrc" / "api").glob("*.cpp"), *(_ROOT / "tests" / "fake_library").glob("*.cpp")])


def _headers() -> list[Path]:
    folders = [_ROOT / "csrc", _ROOT / "csrc" / "api", _ROOT / "tests" / "fake_library" / "include"]
    return sorted(header for folder in folders for header in folder.glob("*.h"))


def compiler() -> str | None:
    """The C++ compiler that builds the library, None if the machine has none."""
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


@functools.cache
def library_dir() -> Path:
    """The folder with the libraries of all three paths, built once per state of their sources."""
    cxx = compiler()
    if cxx is None:
        pytest.skip("needs a C++ compiler")
    digest = hashlib.sha256()
    for file in (*_sources(), *_headers(), Path(__file__)):
        digest.update(file.read_bytes())
    folder = _ROOT / "build" / "fake_library" / digest.hexdigest()[:16]
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    for outdated in folder.parent.glob("[0-9a-f]" * 16):
        shutil.rmtree(outdated, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        built = Path(temporary) / "built"
        built.mkdir()
        for path, capability in _COMPUTE_CAPABILITY.items():
            command = [cxx, "-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden"]
            command += [f'-DFLASH_EXT_PATH_NAME="{path}"', f'-DFAKE_DEFAULT_CC="{capability}"']
            command += ["-I", str(_ROOT / "tests" / "fake_library" / "include"), "-I", str(_ROOT / "csrc")]
            command += [*map(str, _sources()), "-o", str(built / f"libflash_ext_{path}.so")]
            subprocess.run(command, check=True)
        if not folder.exists():  # another process may have been faster
            built.rename(folder)
    return folder


class FakeRuntime:
    """What the library of one path tells about its calls, in the process that uses it."""

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(str(library_dir() / f"libflash_ext_{path}.so"))
        self._library.fake_last_call.restype = ctypes.c_char_p

    def last_call(self) -> dict[str, Any]:
        """Kernel, parameters and context of this thread's last launch; an empty dict if there was none."""
        text = self._library.fake_last_call().decode()
        return json.loads(text) if text else {}

    def fail_next(self, error: int) -> None:
        """Let the next launch return this cudaError_t."""
        self._library.fake_fail_next(error)

    def set_launch_milliseconds(self, milliseconds: int) -> None:
        """Let every launch sleep."""
        self._library.fake_set_launch_milliseconds(milliseconds)

    def set_idle(self, idle: bool) -> None:
        """Let every launch return at once, with nothing done and nothing recorded."""
        self._library.fake_set_idle(int(idle))

    @property
    def current_device(self) -> int:
        """This thread's current device."""
        return int(self._library.fake_get_device())

    @current_device.setter
    def current_device(self, device: int) -> None:
        self._library.fake_set_device(device)


# ---------------------------------------------------------------------------------------------------------------------
# The processes.

_MAX_PROCESSES = 3  # alive at a time, each with its torch

_bodies: dict[tuple[str, str], Callable[..., None]] = {}
_pools: dict[tuple[tuple[str, str], ...], ProcessPoolExecutor] = {}


def _prepare(environment: dict[str, str], sys_path: list[str]) -> None:
    """Runs first in a new process, before flash_ext is imported there."""
    for variable in [name for name in os.environ if name.startswith(("FLASH_EXT_", "FAKE_"))]:
        del os.environ[variable]
    os.environ.update(environment)
    sys.path[:] = sys_path
    if "flash_ext" in sys.modules:
        raise RuntimeError("flash_ext was imported before its environment was set")
    import torch

    torch.set_num_threads(1)


def _run(module: str, name: str, arguments: dict[str, Any]) -> None:
    import torch

    __import__(module)
    torch.manual_seed(zlib.crc32(f"{name} {sorted(arguments.items())}".encode()))
    try:
        _bodies[module, name](**arguments)
    except pytest.fail.Exception as failure:  # cannot be pickled
        raise AssertionError(str(failure)) from None


@atexit.register
def _shut_down() -> None:
    for pool in _pools.values():
        pool.shutdown(cancel_futures=True)
    _pools.clear()


def _pool(environment: dict[str, str]) -> ProcessPoolExecutor:
    key = tuple(sorted(environment.items()))
    pool = _pools.pop(key, None)
    if pool is None:
        while len(_pools) >= _MAX_PROCESSES:
            _pools.pop(next(iter(_pools))).shutdown()  # the least recently used
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, context, _prepare, (environment, list(sys.path)))
    _pools[key] = pool
    return pool


def in_process(**environment: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test in a process with these environment variables and the libraries of `library_dir`.

    Tests with the same variables share a process, one after the other. Arguments of the test must be picklable, and its
    module must not import flash_ext.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        module, name = body.__module__, body.__name__
        _bodies[module, name] = body

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            variables = {"FLASH_EXT_LIBRARY_DIR": str(library_dir()), **environment}
            _pool(variables).submit(_run, module, name, arguments).result()

        return test

    return decorate
