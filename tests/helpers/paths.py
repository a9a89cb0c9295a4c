"""The paths that the contract tests run on: what they are called, what they need, how their process is set up.

A path is one implementation of the contract: ``cpu``, a path's kernels on a real GPU (``sm80``), or the same kernels in
the PTX emulator (``sm80-emulated``). flash_ext reads its environment once, at import, so each path has a process of its
own; `environment` is what that process needs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, TypeVar

import torch

__all__ = [
    "INDEPENDENT",
    "NAMES",
    "Path",
    "available",
    "emulated_library_dir",
    "environment",
    "unavailable_reason",
]

KERNEL_PATHS = ("sm80", "sm90", "sm100")
# GPUs as which the emulator runs sm80 beside 9.0, with the KiB of shared memory of a CTA: only cases that take another
# tile there than on 9.0.
SMALLER_GPUS = {"8.0": 163, "8.6": 99, "12.0": 99}
NAMES = (
    "cpu",
    *KERNEL_PATHS,
    *(f"{name}-emulated" for name in KERNEL_PATHS),
    *(f"sm80-emulated-{capability}" for capability in SMALLER_GPUS),
)
# The process that runs the tests which ask for no path; its environment is the user's.
INDEPENDENT = "none"

_ROOT = FilePath(__file__).resolve().parents[2]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Path:
    """One implementation under test, as the fixture ``path`` hands it to a test."""

    name: str

    @property
    def library(self) -> str:
        """The name dispatch knows it by: ``cpu``, ``sm80``, ``sm90`` or ``sm100``."""
        return self.name.split("-")[0]

    @property
    def capability(self) -> str | None:
        """The compute capability that the emulator pretends in place of the library's own, "8.6"; else None."""
        return self.name.split("-emulated-")[1] if "-emulated-" in self.name else None

    @property
    def kind(self) -> str:
        """``cpu``, ``emulated`` or ``gpu``: how much work it can take, and where its tensors live."""
        if self.name == "cpu":
            return "cpu"
        return "emulated" if "-emulated" in self.name else "gpu"

    @property
    def device(self) -> torch.device:
        """Where the tensors of its calls live."""
        return torch.device("cuda", torch.cuda.current_device()) if self.kind == "gpu" else torch.device("cpu")

    def fit(self, gpu: _T, cpu: _T, emulated: _T) -> _T:
        """The size of a test that suits this path; the fault it looks for must be reachable at each of them."""
        return {"gpu": gpu, "cpu": cpu, "emulated": emulated}[self.kind]

    def supports(
        self,
        direction: str,
        dtype: torch.dtype = torch.bfloat16,
        head_dims: tuple[int, int] = (64, 64),
        features: Iterable[str] = (),
    ) -> bool:
        """Whether a built kernel serves such calls (always, on the cpu path).

        Parameters
        ----------
        direction : str
            ``forward`` or ``backward``.
        dtype : torch.dtype
            Of q, k and v.
        head_dims : tuple of int
            Head dim of q and k, head dim of v.
        features : iterable of str
            Names as in ``csrc/kernels.toml``.
        """
        return self.kind == "cpu" or bool(self._serving(direction, dtype, head_dims, features))

    def changes_tile(
        self, direction: str, dtype: torch.dtype, head_dims: tuple[int, int], features: Iterable[str], limit: int
    ) -> bool:
        """Whether such calls run on another tile where a CTA may use only ``limit`` bytes of shared memory.

        Parameters
        ----------
        direction, dtype, head_dims, features
            As in `supports`.
        limit : int
            What ``FLASH_EXT_MAX_SHARED_MEMORY`` says, or another GPU's shared memory.
        """
        if self.kind == "cpu":
            return False
        rows = self._serving(direction, dtype, head_dims, features)
        fitting = [row for row in rows if row["shared_memory"] <= limit]

        def first(choice: list[dict[str, Any]]) -> dict[str, Any] | None:
            return min(choice, key=lambda row: (row["head_dim"], row["head_dim_v"]), default=None)

        return bool(fitting) and first(fitting) != first(rows)

    def takes_another_tile(
        self, direction: str, dtype: torch.dtype, head_dims: tuple[int, int], features: Iterable[str]
    ) -> bool:
        """Whether such calls run on another tile on the pretended GPU than on the library's own."""
        limit = SMALLER_GPUS[self.capability or "8.0"] * 1024
        return self.changes_tile(direction, dtype, head_dims, features, limit)

    def _serving(
        self, direction: str, dtype: torch.dtype, head_dims: tuple[int, int], features: Iterable[str]
    ) -> list[dict[str, Any]]:
        """The kernels that can do what such calls ask, best first within equal head dims."""
        wanted = set(features)
        name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        return [
            row
            for row in _kernels(self.library)
            if row["direction"] == direction
            and row["dtype"] == name
            and row["head_dim"] >= head_dims[0]
            and row["head_dim_v"] >= head_dims[1]
            and wanted <= set(row["features"])
        ]


@functools.cache
def _kernels(library: str) -> tuple[dict[str, Any], ...]:
    """The rows of the registry that this process's library of a path was built with."""
    import flash_ext

    return tuple(row for row in flash_ext.kernels() if row["path"] == library)


def emulated_library_dir(name: str) -> FilePath | None:
    """The folder with a path's library linked against the PTX emulator, or None where it was not built.

    Parameters
    ----------
    name : str
        ``sm80`` or ``sm80-emulated``.

    Returns
    -------
    pathlib.Path or None
        ``FLASH_EXT_TEST_EMULATOR_DIR`` if it holds the library, else ``build/emulator/<path>``.
    """
    library = name.split("-")[0]
    given = os.environ.get("FLASH_EXT_TEST_EMULATOR_DIR")
    candidates = [FilePath(given), FilePath(given) / library] if given else []
    candidates.append(_ROOT / "build" / "emulator" / library)
    for folder in candidates:
        if (folder / f"libflash_ext_{library}.so").is_file():
            return folder.resolve()
    return None


def _library_dir() -> FilePath | None:
    """Where flash_ext will look for the libraries of the kernels, found without importing it."""
    given = os.environ.get("FLASH_EXT_LIBRARY_DIR")
    if given:
        return FilePath(given)
    spec = importlib.util.find_spec("flash_ext")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    return FilePath(locations[0]) if locations else None


def _serves(library: str, capability: tuple[int, int]) -> bool:
    """Whether a GPU of this compute capability runs a path's machine code."""
    return {"sm80": capability >= (8, 0), "sm90": capability == (9, 0), "sm100": capability in ((10, 0), (10, 3))}[
        library
    ]


def unavailable_reason(name: str) -> str | None:
    """Why a path cannot run on this machine, or None if it can."""
    if name == "cpu":
        return None
    path = Path(name)
    if path.kind == "emulated":
        return None if emulated_library_dir(name) else "its library is not built against the PTX emulator"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    capability = torch.cuda.get_device_capability()
    if not _serves(path.library, capability):
        return f"compute capability {capability[0]}.{capability[1]} does not run it"
    folder = _library_dir()
    if folder is None or not (folder / f"libflash_ext_{path.library}.so").is_file():
        return f"libflash_ext_{path.library}.so is not built"
    return None


def available() -> list[str]:
    """The paths that this machine can run, in the order of `NAMES`."""
    return [name for name in NAMES if unavailable_reason(name) is None]


def environment(name: str) -> dict[str, str]:
    """The environment variables that make a process run this path.

    ``FLASH_EXT_POISON=1`` is among them for every process: outputs and workspaces start as NaN.
    """
    variables = {"FLASH_EXT_POISON": "1"}
    if name == INDEPENDENT:
        return variables
    path = Path(name)
    variables["FLASH_EXT_PATH"] = path.library
    if path.kind == "emulated":
        variables["FLASH_EXT_EMULATE"] = path.library
        variables["FLASH_EXT_LIBRARY_DIR"] = str(emulated_library_dir(name))
        schedules = "eager,lazy,random,pct"
        if path.capability:
            variables["FLASH_EXT_EMULATE_CC"] = path.capability
            schedules = "eager,random"
        variables["FLASH_EXT_EMULATOR_SCHEDULE"] = os.environ.get("FLASH_EXT_EMULATOR_SCHEDULE", schedules)
    return variables
