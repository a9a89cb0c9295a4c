"""What changes for a while within a process: environment variables of the emulator, and the tile that is chosen."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["environment", "forced_tile"]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Environment variables that are read by every call (those of the emulator; flash_ext reads its own at import).

    ctypes and os.environ share the C environment, so a loaded library sees them.
    """
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def forced_tile(block_m: int, block_n: int) -> Iterator[None]:
    """What FLASH_EXT_TILE does for a process: only kernels with this tile, of query rows and key rows."""
    from flash_ext import _C
    from flash_ext.environment import TILE

    _C.force_tile(block_m, block_n)
    try:
        yield
    finally:
        _C.force_tile(*TILE)
