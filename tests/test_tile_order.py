"""The order in which a grid walks heads and tiles (``csrc/core/tile_order.cuh``), compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

CXX = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")

SOURCE = r"""
#include <algorithm>
#include <cstdint>
using std::min;
#define __device__
#define __forceinline__ inline
#include "core/tile_order.cuh"

// Head and tile of each position. is_large: by the divisions of grids beyond 2^31 tiles.
extern "C" void walk(int64_t heads, int64_t tiles, int64_t section, int64_t last, int is_large, int64_t* out) {
    flash_ext::TileOrder order = flash_ext::ascending_order(heads, tiles, section, last);
    order.is_large = is_large;
    for (int64_t position = 0; position < heads * tiles; ++position) {
        const flash_ext::TileIndex index = flash_ext::tile_at(order, position);
        out[2 * position] = index.head;
        out[2 * position + 1] = index.tile;
    }
}
"""

Walk = Callable[[int, int, int, int, bool], "np.ndarray[tuple[int, int], np.dtype[np.int64]]"]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """walk(heads, tiles, section, last, is_large): head and tile of each position."""
    folder = tmp_path_factory.mktemp("tile_order")
    (folder / "walk.cpp").write_text(SOURCE, encoding="utf-8")
    csrc = Path(__file__).parents[1] / "csrc"
    assert CXX is not None
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{csrc}"]
    subprocess.run([CXX, *flags, "walk.cpp", "-o", "walk.so"], cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "walk.so"))

    def call(
        heads: int, tiles: int, section: int, last: int, is_large: bool
    ) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        out = np.full((heads * tiles, 2), -1, np.int64)
        arguments = [ctypes.c_int64(value) for value in (heads, tiles, section, last)]
        library.walk(*arguments, ctypes.c_int(is_large), ctypes.c_void_p(out.ctypes.data))
        return out

    return call


@settings(max_examples=300, deadline=None)
@given(
    heads=st.integers(1, 40),
    tiles=st.integers(1, 12),
    section=st.integers(1, 45),
    last=st.integers(0, 12),
    is_large=st.booleans(),
)
def test_each_tile_once(walk: Walk, heads: int, tiles: int, section: int, last: int, is_large: bool) -> None:
    """Every head and tile once; sections of neighbouring heads, whose tiles ascend; a last section of at least `last`
    heads and of `section`, if there are as many."""
    order = walk(heads, tiles, section, last, is_large)
    assert sorted(map(tuple, order.tolist())) == [(head, tile) for head in range(heads) for tile in range(tiles)]
    if tiles == 1:  # where sections begin cannot be seen
        assert (np.diff(order[:, 0]) == 1).all()
        return
    starts = [i for i in range(len(order)) if order[i, 1] == 0 and (i == 0 or order[i - 1, 1] != 0)]
    for start, end in zip(starts, [*starts[1:], len(order)], strict=True):
        inside = order[start:end]
        heads_inside = len(inside) // tiles
        assert (np.diff(inside[:, 1]) >= 0).all()
        assert set(inside[:, 0]) == set(range(inside[0, 0], inside[0, 0] + heads_inside))
        if end < len(order):
            assert heads_inside == len(order[starts[0] : starts[1]]) // tiles
            assert heads_inside >= min(section, heads)
    assert (len(order) - starts[-1]) // tiles >= min(heads, max(section, last))
