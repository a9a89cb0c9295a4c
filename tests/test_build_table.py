"""csrc/kernels.toml and what the generator makes of it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

import generate
import toolchain

ROOT = Path(__file__).resolve().parent.parent
FEATURES = generate.known_features((ROOT / "csrc" / "params.h").read_text())

PREAMBLE = """
[path.sm80]
gencode = "arch=compute_80,code=[sm_80,compute_80]"
needs_cutlass = false
[path.sm90]
gencode = "arch=compute_90a,code=sm_90a"
needs_cutlass = true
[variant.plain]
features = ["causal", "window"]
[variant.rich]
features = ["causal", "window", "general_scale"]
"""
ROW = {
    "path": '"sm80"',
    "direction": '"forward"',
    "dtype": '["fp16", "bf16"]',
    "head_dim": "[192, 128]",
    "tiles": "[{ block_m = 128, block_n = 64, stages = 2, warps = 8, split = true, when = 'masked' }, "
    "{ block_m = 64, block_n = 32, stages = 1, warps = 4 }]",
    "variants": '["plain", "rich"]',
}


def row(**changes: str | None) -> str:
    """A [[kernel]] row; a key given as None is left out."""
    keys = {**ROW, **changes}
    return "[[kernel]]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items() if value is not None)


def read(text: str) -> generate.Table:
    return generate.read_table(text, FEATURES)


def test_the_projects_own_table_is_valid() -> None:
    table, features = generate.load(ROOT)
    assert set(table.paths) == set(generate.PATHS) == set(toolchain.PATHS)
    assert features["general_scale"] == "kFeatureGeneralScale"
    assert features["causal"] == "kFeatureCausal"


def test_a_row_makes_a_kernel_per_dtype_tile_and_variant_in_that_order() -> None:
    names = [kernel.name for kernel in read(PREAMBLE + row()).kernels]
    assert names == [
        f"sm80_forward_{dtype}_d192x128_{tile}_{variant}"
        for dtype in ("fp16", "bf16")
        for tile in ("m128n64", "m64n32")
        for variant in ("plain", "rich")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("[[kernel", "not valid TOML", id="syntax"),
        pytest.param(PREAMBLE + "[kernels]\n", "the table: unknown key 'kernels'; allowed are path, variant", id="top"),
        pytest.param(PREAMBLE + row(block_m="64"), "number 1: unknown key 'block_m'", id="row-key"),
        pytest.param(PREAMBLE + row(dtype=None), "number 1: the key 'dtype' is missing", id="row-missing"),
        pytest.param(PREAMBLE + row(path='"sm75"'), "path='sm75'; allowed are sm80, sm90", id="path"),
        pytest.param(PREAMBLE + row(direction='"up"'), "direction='up'; allowed are forward, backward", id="direction"),
        pytest.param(PREAMBLE + row(dtype='["fp32"]'), "dtype='fp32'; allowed are fp16, bf16", id="dtype"),
        pytest.param(PREAMBLE + row(dtype='["fp16", "fp16"]'), "names one twice", id="dtype-twice"),
        pytest.param(PREAMBLE + row(dtype='"fp16"'), "it is a list with at least one name", id="dtype-list"),
        pytest.param(PREAMBLE + row(head_dim="[128]"), "it is a pair", id="head-dim-pair"),
        pytest.param(PREAMBLE + row(head_dim="[100, 128]"), "head_dim=100; allowed are", id="head-dim-step"),
        pytest.param(PREAMBLE + row(head_dim="[264, 128]"), "from 8 to 256 in steps of 8", id="head-dim-range"),
        pytest.param(PREAMBLE + row(tiles="[]"), "at least one tile", id="no-tiles"),
        pytest.param(PREAMBLE + row(tiles="[{ block_m = 64, block_n = 64, stages = 1 }]"), "lacks warps", id="tile"),
        pytest.param(
            PREAMBLE + row(tiles="[{ block_m = 64, block_n = 64, stages = true, warps = 4 }]"),
            "stages=True; allowed are integers",
            id="tile-boolean",
        ),
        pytest.param(
            PREAMBLE + row(tiles="[{ block_m = 64, block_n = 64, stages = 1, warps = 4, when = 'causal' }]"),
            "when='causal'; allowed are masked, full",
            id="when",
        ),
        pytest.param(
            PREAMBLE + row(tiles="[{ block_m = 64, block_n = 64, stages = 1, warps = 4, Q = 1 }]"),
            "'Q' cannot name a field",
            id="tile-field",
        ),
        pytest.param(
            PREAMBLE + row(tiles="[{ block_m = 64, block_n = 64, stages = 1, warps = 4, q = 'smem' }]"),
            "neither an integer nor a boolean",
            id="tile-value",
        ),
        pytest.param(
            PREAMBLE + row(tiles="[" + ", ".join(["{ block_m = 64, block_n = 64, stages = 1, warps = 4 }"] * 2) + "]"),
            "differ in block_m or block_n",
            id="tile-twice",
        ),
        pytest.param(PREAMBLE + row(variants='["fast"]'), "variants='fast'; allowed are plain, rich", id="variant"),
        pytest.param(
            PREAMBLE + row() + row(dtype='["bf16"]', variants='["rich"]'),
            "number 2 overlaps [[kernel]] number 1",
            id="overlap",
        ),
        pytest.param(PREAMBLE.replace("window", "widow", 1), "features='widow'; allowed are causal", id="feature"),
        pytest.param(PREAMBLE.replace("false", "0"), "needs_cutlass=0 is not a bool", id="path-type"),
        pytest.param(PREAMBLE.replace("sm90]", "sm91]", 1), "[path.sm91]: path='sm91'; allowed", id="path-name"),
        pytest.param(PREAMBLE.replace("variant.rich", "variant.odd"), "allowed are plain, rich", id="variant-name"),
    ],
)
def test_a_wrong_table_is_one_error_that_says_where_and_what(text: str, message: str) -> None:
    with pytest.raises(generate.TableError, match=re.escape(message)):
        read(text)


def test_rows_of_other_dtypes_variants_or_head_dims_do_not_overlap() -> None:
    rows = (
        row(dtype='["fp16"]') + row(dtype='["bf16"]', variants='["plain"]') + row(dtype='["bf16"]', variants='["rich"]')
    )
    assert len(read(PREAMBLE + rows + row(head_dim="[64, 64]")).kernels) == 2 * len(read(PREAMBLE + row()).kernels)


def test_a_unit_instantiates_the_kernel_of_its_row() -> None:
    kernel = read(PREAMBLE + row()).kernels[1]
    text = generate.unit_source(kernel, FEATURES)
    assert '#include "sm80/forward.cuh"' in text
    assert "sm80::Forward<DataType::kFloat16, /*head_dim=*/192, /*head_dim_v=*/128," in text
    # The tile's own keys in the order of the table, `when` is not the kernel's business.
    assert "ForwardTile{.block_m = 128, .block_n = 64, .stages = 2, .warps = 8, .split = true}, /*rich=*/true>" in text
    assert "kFeatureCausal | kFeatureWindow | kFeatureGeneralScale" in text
    assert text.count(f"kernel_{kernel.name}") == 2


def make_tree(folder: Path, table: str) -> Path:
    """A source tree with nothing but a table and the parameter structs."""
    (folder / "csrc").mkdir(parents=True)
    (folder / "csrc" / "kernels.toml").write_text(table)
    shutil.copy(ROOT / "csrc" / "params.h", folder / "csrc")
    return folder


def test_generating_again_touches_only_what_changed(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "source", PREAMBLE + row())
    build = tmp_path / "build"
    names = generate.generate(tree, build, "sm80", {"commit": "one"})
    files = {file.name: file for file in (build / "generated").iterdir()}
    assert set(files) == {"registry.cpp", *(f"{name}.cu" for name in names)}
    for file in files.values():
        os.utime(file, (1, 1))

    # Another commit: the registry alone. A row less: its files go.
    generate.generate(tree, build, "sm80", {"commit": "two"})
    assert [file.name for file in files.values() if file.stat().st_mtime != 1] == ["registry.cpp"]
    assert '"commit": "two"' in files["registry.cpp"].read_text()
    (tree / "csrc" / "kernels.toml").write_text(PREAMBLE)
    assert generate.generate(tree, build, "sm80", {}) == []
    assert [file.name for file in (build / "generated").iterdir()] == ["registry.cpp"]


def test_the_registry_keeps_order_and_when(tmp_path: Path) -> None:
    text = generate.registry_source(read(PREAMBLE + row()).kernels, {"quote": 'a "b"'})
    entries = re.findall(r"\{&kernel_(\w+), When::(\w+)\}", text)
    assert [name for name, _ in entries] == [kernel.name for kernel in read(PREAMBLE + row()).kernels]
    assert [when for _, when in entries] == ["kMasked", "kMasked", "kAlways", "kAlways"] * 2
    assert "kRegistryCount = 8;" in text
    assert r'R"json({"quote": "a \"b\""})json"' in text
