"""What flash_ext reads from the environment at run time: every variable once, at import, and nowhere else.

What is malformed is refused then, by a `ValueError` that names the variable, its value and what is allowed. An empty
value means the same as none. The compiled module and the libraries of the paths get what they need from here
(``_C.configure``). README.md says what each variable does.
"""

from __future__ import annotations

import os
import re

from flash_ext import _C

__all__ = ["CHECK", "EMULATE", "LIBRARY_DIR", "NO_DLPACK", "PATH", "POISON", "TILE", "VARIABLES"]

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_MAX_INT32 = 2**31 - 1


def _refuse(variable: str, value: str, expected: str) -> ValueError:
    return ValueError(f"flash_ext: {variable} is {value!r}; expected {expected}, or leave it unset")


def _read(variable: str) -> str:
    return os.environ.get(variable, "").strip()


def _read_flag(variable: str) -> bool:
    value = _read(variable)
    if value and value.lower() not in (*_TRUE, *_FALSE):
        raise _refuse(variable, value, f"{', '.join(_TRUE)} or {', '.join(_FALSE)}")
    return value.lower() in _TRUE


def _read_path(variable: str, *others: str) -> str | None:
    value = _read(variable)
    allowed = (*_C.PATHS, *others)
    if value and value not in allowed:
        raise _refuse(variable, value, f"one of {', '.join(allowed)}")
    return value or None


def _is_positive(digits: str) -> bool:
    return re.fullmatch("[0-9]{1,10}", digits) is not None and 0 < int(digits) <= _MAX_INT32


def _read_positive(variable: str) -> int:
    """A positive integer, 0 if there is none."""
    value = _read(variable)
    if value and not _is_positive(value):
        raise _refuse(variable, value, f"an integer from 1 to {_MAX_INT32}")
    return int(value or 0)


def _read_tile(variable: str) -> tuple[int, int]:
    """Query rows and key rows of a tile, (0, 0) if there is none."""
    value = _read(variable)
    if not value:
        return 0, 0
    sizes = value.split("x")
    if len(sizes) != 2 or not all(map(_is_positive, sizes)):
        raise _refuse(variable, value, "two positive integers as in 128x64 (query rows x key rows)")
    return int(sizes[0]), int(sizes[1])


#: FLASH_EXT_CHECK: validate cu_seqlens and seqused, with a synchronisation.
CHECK = _read_flag("FLASH_EXT_CHECK")
#: FLASH_EXT_POISON: outputs and workspaces start as NaN bytes.
POISON = _read_flag("FLASH_EXT_POISON")
#: FLASH_EXT_NO_DLPACK: tensors are read through their attributes.
NO_DLPACK = _read_flag("FLASH_EXT_NO_DLPACK")
#: FLASH_EXT_EMULATE: the path whose kernels run on CPU tensors, in the emulator that its library is linked against.
EMULATE = _read_path("FLASH_EXT_EMULATE")
#: FLASH_EXT_PATH: the path that serves every call. None: the GPU decides.
PATH = _read_path("FLASH_EXT_PATH", "cpu")
#: FLASH_EXT_LIBRARY_DIR: where the libraries of the paths are, absolute; "": the package's own folder.
LIBRARY_DIR = os.path.abspath(_read("FLASH_EXT_LIBRARY_DIR")) if _read("FLASH_EXT_LIBRARY_DIR") else ""

if EMULATE is not None and PATH not in (None, EMULATE, "cpu"):
    raise _refuse("FLASH_EXT_PATH", str(PATH), f"{EMULATE} (which FLASH_EXT_EMULATE emulates) or cpu")

#: FLASH_EXT_TILE: query rows and key rows of the only tile that is chosen, (0, 0): any. `_C.force_tile` changes it.
TILE = _read_tile("FLASH_EXT_TILE")
_C.configure(
    library_dir=LIBRARY_DIR,
    emulated=EMULATE is not None,
    use_dlpack=not NO_DLPACK,
    block_m=TILE[0],
    block_n=TILE[1],
    sm_count=_read_positive("FLASH_EXT_SM_COUNT"),
    max_shared_memory=_read_positive("FLASH_EXT_MAX_SHARED_MEMORY"),
)

#: Everything that README.md lists, for ``python -m flash_ext info``. The last two are read by those whom they concern:
#: the emulator and the demo.
VARIABLES = (
    "FLASH_EXT_PATH",
    "FLASH_EXT_LIBRARY_DIR",
    "FLASH_EXT_NO_DLPACK",
    "FLASH_EXT_POISON",
    "FLASH_EXT_CHECK",
    "FLASH_EXT_EMULATE",
    "FLASH_EXT_MAX_SHARED_MEMORY",
    "FLASH_EXT_TILE",
    "FLASH_EXT_SM_COUNT",
    "FLASH_EXT_EMULATE_CC",
    "FLASH_EXT_DEMO_MODEL",
)
