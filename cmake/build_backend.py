"""The PEP 517 build backend: setuptools', which also asks for what compiles the kernels.

pip builds in an environment of its own that holds only what is asked for. So this asks for the CUDA toolkit of PyPI
where the machine has none of at least version 13.0, and for pip, which fetches the CUTLASS headers. Nothing is asked
for FLASH_EXT_PATHS=none.
"""

from __future__ import annotations

import sys
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

import toolchain

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """setuptools' requirements and `toolchain.build_requirements`."""
    return [*build_meta.get_requires_for_build_wheel(config_settings), *_native_requirements()]


def get_requires_for_build_editable(config_settings: Any = None) -> list[str]:
    """setuptools' requirements and `toolchain.build_requirements`."""
    return [*build_meta.get_requires_for_build_editable(config_settings), *_native_requirements()]


def _native_requirements() -> list[str]:
    try:
        return toolchain.build_requirements(toolchain.read_options().paths)
    except toolchain.BuildError as error:
        sys.exit(f"flash_ext: {error}")
