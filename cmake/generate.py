"""Makes the instantiation units and the C++ registry of each path from csrc/kernels.toml.

The table is read strictly: an unknown key, a row that overlaps another or a value out of range is one `TableError` that
names the row. Nothing generated is committed, and a file is written only when its content changes, so that nothing is
compiled for nothing.

Run by hand it prints the units of a path: ``python cmake/generate.py sm80``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATHS = ("sm80", "sm90", "sm100")
DIRECTIONS = {"forward": "kForward", "backward": "kBackward"}
DTYPES = {"fp16": "kFloat16", "bf16": "kBFloat16"}
VARIANTS = ("plain", "rich")  # the kernels' template parameter `rich`
WHENS = {None: "kAlways", "masked": "kMasked", "full": "kFull"}
TILE_KEYS = ("block_m", "block_n", "stages", "warps")
ROW_KEYS = ("path", "direction", "dtype", "head_dim", "tiles", "variants")


class TableError(ValueError):
    """csrc/kernels.toml does not say what it may say."""


@dataclass(frozen=True)
class PathSettings:
    """How one path is compiled.

    Attributes
    ----------
    gencode : str
        The argument of nvcc's ``-gencode``.
    needs_cutlass : bool
        Whether its sources include CUTLASS headers.
    """

    gencode: str
    needs_cutlass: bool


@dataclass(frozen=True)
class Kernel:
    """One instance: a row of the table times dtype, tile and variant."""

    path: str
    direction: str
    dtype: str
    head_dim: int
    head_dim_v: int
    tile: tuple[tuple[str, int | bool], ...]
    when: str | None
    variant: str
    features: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the kernel and of its unit, e.g. ``sm80_forward_bf16_d128x128_m128n64_plain``."""
        tile = dict(self.tile)
        return (
            f"{self.path}_{self.direction}_{self.dtype}_d{self.head_dim}x{self.head_dim_v}"
            f"_m{tile['block_m']}n{tile['block_n']}_{self.variant}"
        )


@dataclass(frozen=True)
class Table:
    """csrc/kernels.toml after all checks: settings per path, and the kernels in the table's order."""

    paths: Mapping[str, PathSettings]
    kernels: tuple[Kernel, ...] = field(default=())

    def of_path(self, path: str) -> tuple[Kernel, ...]:
        """The kernels of one path in order of preference."""
        return tuple(kernel for kernel in self.kernels if kernel.path == path)


def known_features(params_header: str) -> dict[str, str]:
    """Feature names, as kernels.toml writes them, to the enumerators of csrc/params.h.

    Parameters
    ----------
    params_header : str
        The text of csrc/params.h.

    Returns
    -------
    dict of str to str
        For example ``{"general_scale": "kFeatureGeneralScale"}``.
    """
    names = re.findall(r"\bkFeature([A-Z]\w*)\s*=", params_header)
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower(): f"kFeature{name}" for name in names}


def read_table(text: str, features: Mapping[str, str]) -> Table:
    """Read and check the table of kernels.

    Parameters
    ----------
    text : str
        The text of csrc/kernels.toml.
    features : mapping of str to str
        What `known_features` returned.

    Returns
    -------
    Table

    Raises
    ------
    TableError
        Names the row and what is allowed.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise TableError(f"csrc/kernels.toml is not valid TOML: {error}") from error
    _check_keys("the table", data, ("path", "variant", "kernel"), required=("path", "variant"))

    paths: dict[str, PathSettings] = {}
    for name, settings in data["path"].items():
        where = f"[path.{name}]"
        _one_of(where, "path", name, PATHS)
        _check_keys(where, settings, ("gencode", "needs_cutlass"), required=("gencode", "needs_cutlass"))
        _typed(where, "gencode", settings["gencode"], str)
        _typed(where, "needs_cutlass", settings["needs_cutlass"], bool)
        paths[name] = PathSettings(settings["gencode"], settings["needs_cutlass"])

    variants: dict[str, tuple[str, ...]] = {}
    for name, variant in data["variant"].items():
        where = f"[variant.{name}]"
        _one_of(where, "variant", name, VARIANTS)
        _check_keys(where, variant, ("features",), required=("features",))
        variants[name] = _names(where, "features", variant["features"], tuple(features))

    kernels: list[Kernel] = []
    rows: dict[tuple[object, ...], str] = {}
    for number, row in enumerate(data.get("kernel", []), start=1):
        where = f"[[kernel]] number {number}"
        for kernel in _expand_row(where, row, paths, variants):
            # Rows overlap if the same call could find its kernel in both: then the order of the file would decide.
            key = (kernel.path, kernel.direction, kernel.dtype, kernel.head_dim, kernel.head_dim_v, kernel.variant)
            if rows.setdefault(key, where) != where:
                raise TableError(f"{where} overlaps {rows[key]}: both make {kernel.name}; write all tiles in one row")
            kernels.append(kernel)
    seen: set[str] = set()
    for kernel in kernels:
        if kernel.name in seen:
            raise TableError(f"two tiles make {kernel.name}: the tiles of a row differ in block_m or block_n")
        seen.add(kernel.name)
    return Table(paths, tuple(kernels))


def _expand_row(
    where: str, row: Any, paths: Mapping[str, PathSettings], variants: Mapping[str, tuple[str, ...]]
) -> Iterator[Kernel]:
    """The kernels of one row: dtype, then tile, then variant, the last varying fastest."""
    _check_keys(where, row, ROW_KEYS, required=ROW_KEYS)
    _one_of(where, "path", row["path"], tuple(paths))
    _one_of(where, "direction", row["direction"], tuple(DIRECTIONS))
    dtypes = _names(where, "dtype", row["dtype"], tuple(DTYPES))
    head_dims = row["head_dim"]
    if not (isinstance(head_dims, list) and len(head_dims) == 2):
        raise TableError(f"{where}: head_dim={head_dims!r}; it is a pair [d, d_v]")
    for value in head_dims:
        _integer(where, "head_dim", value, low=8, high=256, multiple=8)
    tiles = row["tiles"]
    if not (isinstance(tiles, list) and tiles):
        raise TableError(f"{where}: tiles={tiles!r}; it is a list with at least one tile")
    for tile in tiles:
        _check_tile(where, tile)
    for dtype in dtypes:
        for tile in tiles:
            for variant in _names(where, "variants", row["variants"], tuple(variants)):
                yield Kernel(
                    path=row["path"],
                    direction=row["direction"],
                    dtype=dtype,
                    head_dim=head_dims[0],
                    head_dim_v=head_dims[1],
                    tile=tuple((key, value) for key, value in tile.items() if key != "when"),
                    when=tile.get("when"),
                    variant=variant,
                    features=variants[variant],
                )


def _check_tile(where: str, tile: Any) -> None:
    if not isinstance(tile, dict):
        raise TableError(f"{where}: the tile {tile!r} is not a table {{ block_m = ..., ... }}")
    for key in TILE_KEYS:
        if key not in tile:
            raise TableError(f"{where}: the tile {tile!r} lacks {key}")
    _integer(where, "block_m", tile["block_m"], low=8, high=512, multiple=8)
    _integer(where, "block_n", tile["block_n"], low=8, high=512, multiple=8)
    _integer(where, "stages", tile["stages"], low=1, high=16)
    _integer(where, "warps", tile["warps"], low=1, high=32)
    for key, value in tile.items():
        if key == "when":
            _one_of(where, "when", value, ("masked", "full"))
        elif not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            raise TableError(f"{where}: the tile key {key!r} cannot name a field of the path's tile struct")
        elif not isinstance(value, int):  # bool is an int
            raise TableError(f"{where}: the tile key {key}={value!r} is neither an integer nor a boolean")


def _check_keys(where: str, value: Any, allowed: tuple[str, ...], required: tuple[str, ...]) -> None:
    if not isinstance(value, dict):
        raise TableError(f"{where}: {value!r} is not a table")
    for key in value:
        if key not in allowed:
            raise TableError(f"{where}: unknown key {key!r}; allowed are {', '.join(allowed)}")
    for key in required:
        if key not in value:
            raise TableError(f"{where}: the key {key!r} is missing")


def _typed(where: str, key: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TableError(f"{where}: {key}={value!r} is not a {kind.__name__}")


def _one_of(where: str, key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise TableError(f"{where}: {key}={value!r}; allowed are {', '.join(allowed)}")


def _names(where: str, key: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    if not (isinstance(value, list) and value):
        raise TableError(f"{where}: {key}={value!r}; it is a list with at least one name")
    for name in value:
        _one_of(where, key, name, allowed)
    if len(set(value)) != len(value):
        raise TableError(f"{where}: {key}={value!r} names one twice")
    return tuple(value)


def _integer(where: str, key: str, value: Any, low: int, high: int, multiple: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % multiple:
        step = f" in steps of {multiple}" if multiple > 1 else ""
        raise TableError(f"{where}: {key}={value!r}; allowed are integers from {low} to {high}{step}")


def unit_source(kernel: Kernel, features: Mapping[str, str]) -> str:
    """The C++ text of the unit that instantiates one kernel."""
    literals = {True: "true", False: "false"}
    tile = ", ".join(f".{key} = {literals[value] if isinstance(value, bool) else value}" for key, value in kernel.tile)
    shape = dict(kernel.tile)
    direction = kernel.direction.capitalize()
    mask = " | ".join(features[name] for name in kernel.features)
    rich = literals[kernel.variant == "rich"]
    return f"""// Generated from csrc/kernels.toml.
#include "{kernel.path}/{kernel.direction}.cuh"

#include "api/abi.h"

namespace flash_ext {{

using Kernel_ = {kernel.path}::{direction}<DataType::{DTYPES[kernel.dtype]}, /*head_dim=*/{kernel.head_dim}, \
/*head_dim_v=*/{kernel.head_dim_v},
    {kernel.path}::{direction}Tile{{{tile}}}, /*rich=*/{rich}>;

extern const KernelInfo kernel_{kernel.name};
const KernelInfo kernel_{kernel.name} = {{
    "{kernel.name}", "{kernel.path}",
    Direction::{DIRECTIONS[kernel.direction]}, DataType::{DTYPES[kernel.dtype]}, {kernel.head_dim}, {kernel.head_dim_v},
    {shape["block_m"]}, {shape["block_n"]}, {shape["stages"]}, {shape["warps"]},
    {mask},
    Kernel_::kSharedMemory, &Kernel_::workspace, &Kernel_::launch}};

}}  // namespace flash_ext
"""


def registry_source(kernels: tuple[Kernel, ...], build_info: Mapping[str, Any]) -> str:
    """The C++ text of registry.cpp: what csrc/api/registry.h declares."""
    declarations = "".join(f"extern const KernelInfo kernel_{kernel.name};\n" for kernel in kernels)
    entries = "".join(f"    {{&kernel_{kernel.name}, When::{WHENS[kernel.when]}}},\n" for kernel in kernels)
    info = json.dumps(build_info, sort_keys=True)
    return f"""// Generated from csrc/kernels.toml.
#include "api/registry.h"

namespace flash_ext {{

{declarations}
const RegistryEntry kRegistry[] = {{
{entries or "    {nullptr, When::kAlways},  // no rows yet" + chr(10)}}};
const int32_t kRegistryCount = {len(kernels)};

const char* const kBuildInfo = R"json({info})json";

}}  // namespace flash_ext
"""


def write_if_changed(path: Path, text: str) -> bool:
    """Write a text file unless it has this content already; True if it was written."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return True


def load(source_dir: Path) -> tuple[Table, dict[str, str]]:
    """Read the table and the feature names of a source tree."""
    features = known_features((source_dir / "csrc" / "params.h").read_text(encoding="utf-8"))
    return read_table((source_dir / "csrc" / "kernels.toml").read_text(encoding="utf-8"), features), features


def generate(source_dir: Path, path_build_dir: Path, path: str, build_info: Mapping[str, Any]) -> list[str]:
    """Write the generated folder of one path.

    Parameters
    ----------
    source_dir : Path
        The source tree.
    path_build_dir : Path
        ``build/<path>``; the files go to its folder ``generated``.
    path : str
        One of `PATHS`.
    build_info : mapping
        What the library's ``flash_ext_build_info`` answers.

    Returns
    -------
    list of str
        Names of the kernel units in the order of the table (the probe is not among them: it is not generated).

    Raises
    ------
    TableError
        As `read_table`.
    """
    table, features = load(source_dir)
    kernels = table.of_path(path)
    folder = path_build_dir / "generated"
    wanted = {folder / "registry.cpp": registry_source(kernels, build_info)}
    for kernel in kernels:
        wanted[folder / f"{kernel.name}.cu"] = unit_source(kernel, features)
    for file, text in wanted.items():
        write_if_changed(file, text)
    for file in folder.iterdir():  # a kernel that left the table
        if file not in wanted:
            file.unlink()
    return [kernel.name for kernel in kernels]


def main() -> int:
    """Print the units of the paths given on the command line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("path", nargs="*", default=list(PATHS), choices=PATHS)
    arguments = parser.parse_args()
    table, _ = load(Path(__file__).resolve().parent.parent)
    for path in arguments.path:
        for kernel in table.of_path(path):
            print(kernel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
