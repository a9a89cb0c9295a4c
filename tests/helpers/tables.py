"""Parametrisation of tests by cases and direction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path as FilePath
from typing import Any, TypeVar

import pytest

from .cases import Case

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["for_cases", "native_head_dims"]

_TABLE = FilePath(__file__).resolve().parents[2] / "csrc" / "kernels.toml"
_Test = TypeVar("_Test", bound=Callable[..., Any])


def native_head_dims() -> list[tuple[int, int]]:
    """The (head_dim, head_dim_v) of the table of kernels, all paths and directions: a new row is tested at once."""
    rows = tomllib.loads(_TABLE.read_text(encoding="utf-8"))["kernel"]
    return sorted({(row["head_dim"][0], row["head_dim"][1]) for row in rows})


def for_cases(cases: Iterable[Case], directions: Iterable[str] = ("forward", "backward")) -> Callable[[_Test], _Test]:
    """Run a test for each case, and each case forward and backward, as items of their own.

    A path whose library has no kernel for a case or direction then does not select the item, instead of passing it.
    """
    table = list(cases)
    ids = [str(case) for case in table]
    assert len(set(ids)) == len(ids), "two cases have the same id"

    def parametrise(test: _Test) -> _Test:
        by_direction = pytest.mark.parametrize("direction", list(directions))(test)
        return pytest.mark.parametrize("case", table, ids=ids)(by_direction)

    return parametrise
