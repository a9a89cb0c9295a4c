"""Parametrisation of tests by cases and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import pytest

from .cases import Case

__all__ = ["for_cases"]

_Test = TypeVar("_Test", bound=Callable[..., Any])


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
