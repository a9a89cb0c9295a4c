"""The support table of the README: what the built kernels can do, as markdown.

It is made from the table of kernels, either as the built libraries report it (`flash_ext.kernels`) or as
``csrc/kernels.toml`` of a source tree has it, so that it never says what is not there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGIN = "<!-- support-table:begin -->"
END = "<!-- support-table:end -->"

# Path -> the GPUs (compute capability) it serves.
GPUS = {
    "sm80": "8.0 and newer; the fallback of the other paths",
    "sm90": "9.0",
    "sm100": "10.0, 10.3",
}

# Feature names of csrc/kernels.toml in the order of the table, and how a reader knows them.
_FEATURES = {
    "causal": "causal",
    "window": "window",
    "varlen": "varlen",
    "seqused": "seqused",
    "sinks": "sinks",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "dropout": "dropout",
    "general_scale": "scale <= 0",
    "deterministic": "deterministic",
}
_DTYPES = ("fp16", "bf16", "fp8")

Kernel = Mapping[str, Any]


def kernels_of_source(root: Path) -> list[dict[str, Any]]:
    """The kernels that a source tree builds, as `flash_ext.kernels` would list them (the fields used here).

    Parameters
    ----------
    root : Path
        The tree; its own generator, ``cmake/generate.py``, reads ``csrc/kernels.toml``.

    Raises
    ------
    ValueError
        If the tree has no generator, or the generator refuses the table.
    """
    script = root / "cmake" / "generate.py"
    spec = importlib.util.spec_from_file_location("flash_ext_generate", script)
    if not script.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"flash_ext: {root} is no source tree of flash_ext: it has no cmake/generate.py")
    generate = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = generate  # dataclasses look their module up there
    try:
        spec.loader.exec_module(generate)
        table, _ = generate.load(root)
    finally:
        del sys.modules[spec.name]
    fields = ("name", "path", "direction", "dtype", "head_dim", "head_dim_v", "features")
    return [{field: getattr(kernel, field) for field in fields} for kernel in table.kernels]


def _head_dims(pairs: Iterable[tuple[int, int]]) -> str:
    ordered = sorted(set(pairs), key=lambda pair: (pair[0], -pair[1]))
    return ", ".join(str(d) if d == d_v else f"({d}, {d_v})" for d, d_v in ordered)


def _rows(path: str, direction: str, kernels: Iterable[Kernel]) -> list[tuple[str, ...]]:
    """Rows of one path and direction: head dims that support the same share one."""
    dtypes: dict[tuple[int, int], set[str]] = {}
    features: dict[tuple[int, int], set[str]] = {}
    for kernel in kernels:
        if (kernel["path"], kernel["direction"]) == (path, direction):
            pair = (kernel["head_dim"], kernel["head_dim_v"])
            dtypes.setdefault(pair, set()).add(kernel["dtype"])
            features.setdefault(pair, set()).update(kernel["features"])
    alike: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pair in dtypes:
        types = ", ".join(name for name in _DTYPES if name in dtypes[pair])
        options = ", ".join(label for name, label in _FEATURES.items() if name in features[pair])
        alike.setdefault((types, options), []).append(pair)
    if not alike:
        return [(path, GPUS[path], direction, "-", "none yet", "-")]
    return [
        (path, GPUS[path], direction, types, _head_dims(pairs), options) for (types, options), pairs in alike.items()
    ]


def support_table(kernels: Iterable[Kernel]) -> str:
    """Markdown table of what each path supports.

    Parameters
    ----------
    kernels : iterable of mapping
        With the keys path, direction, dtype, head_dim, head_dim_v and features.

    Returns
    -------
    str
        One row per path, direction and set of equal abilities; no newline at the end.
    """
    listed = list(kernels)
    rows: list[tuple[str, ...]] = [
        ("path", "GPUs (compute capability)", "direction", "dtypes", "native head dims", "options")
    ]
    rows.append(("---",) * len(rows[0]))
    for path in GPUS:
        for direction in ("forward", "backward"):
            rows += _rows(path, direction, listed)
    everything = ", ".join(_FEATURES.values())
    rows.append(("cpu", "none needed", "forward, backward", "fp16, bf16", "any multiple of 8 up to 256", everything))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def embedded_table(text: str) -> str:
    """The table that stands between the markers of a markdown text.

    Raises
    ------
    ValueError
        If the markers are missing or out of order.
    """
    _, begin, rest = text.partition(BEGIN)
    table, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"flash_ext: the text has no {BEGIN} ... {END}")
    return table.strip("\n")


def replace_table(text: str, table: str) -> str:
    """The text with ``table`` between its markers."""
    embedded_table(text)  # raises if the markers are missing
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"
