"""What ptxas says about the kernels: read, checked, printed as a table, and the manifest of what was built."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Shared memory a CTA may use on the smallest GPU the fallback serves (compute capability 8.6, 8.9 and 12.0).
SM80_SHARED_MEMORY = 99 * 1024


class ManifestError(RuntimeError):
    """The build folder does not hold what a manifest promises."""


@dataclass(frozen=True)
class KernelReport:
    """What ptxas says about one function for one architecture.

    Attributes
    ----------
    name : str
        Mangled.
    arch : str
        For example ``sm_90a``.
    registers : int
        Per thread.
    shared_memory : int
        Static shared memory, bytes per CTA.
    stack : int
        Stack frame (local memory), bytes per thread.
    spill_stores, spill_loads : int
        Bytes per thread.
    """

    name: str
    arch: str
    registers: int
    shared_memory: int
    stack: int
    spill_stores: int
    spill_loads: int

    def to_dict(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)


_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)' for '(?P<arch>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_FRAME = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_NOISE = re.compile(r"^ptxas info\s*: |^\s+\d+ bytes stack frame|^\s*$")


def parse_ptxas(text: str) -> tuple[list[KernelReport], str]:
    """Read the messages of ``nvcc -Xptxas -v``.

    Parameters
    ----------
    text : str
        What nvcc wrote to stderr.

    Returns
    -------
    reports : list of KernelReport
        One for each kernel and architecture; functions that are called and not inlined count to none and have 0
        registers.
    messages : str
        The lines that are not statistics: warnings and errors.
    """
    reports: list[KernelReport] = []
    messages: list[str] = []
    arch, function, frame = "", "", (0, 0, 0)
    entry: str | None = None
    for line in text.splitlines():
        if match := _ENTRY.search(line):
            entry, arch = match["name"], match["arch"]
        elif match := _PROPERTIES.search(line):
            function = match["name"]
        elif match := _FRAME.search(line):
            values = (int(match["stack"]), int(match["stores"]), int(match["loads"]))
            if function == entry:
                frame = values
            elif any(values):  # a device function of its own
                reports.append(KernelReport(function, arch, 0, 0, *values))
        elif (match := _USED.search(line)) and entry is not None:
            shared = _SHARED.search(line)
            reports.append(
                KernelReport(entry, arch, int(match["registers"]), int(shared.group(1)) if shared else 0, *frame)
            )
            entry, frame = None, (0, 0, 0)
        if not _NOISE.search(line):
            messages.append(line + "\n")
    return reports, "".join(messages)


def short_name(mangled: str) -> str:
    """The unqualified name of a mangled function without its template arguments, e.g. ``forward_kernel``."""
    match = re.match(r"_ZN?K?", mangled)
    if match is None:
        return mangled
    rest, name = mangled[match.end() :], mangled
    while length := re.match(r"\d+", rest):
        size = int(length.group())
        name, rest = rest[length.end() :][:size], rest[length.end() + size :]
    return name


def problems(unit: str, kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """Why a unit must not ship: local memory or spills.

    Parameters
    ----------
    unit : str
        Its name, for the message.
    kernels : iterable of mapping
        The ``kernels`` of its report.

    Returns
    -------
    list of str
        One sentence for each kernel and architecture; empty when all is well.
    """
    found = []
    for kernel in kernels:
        where = f"{unit}: {short_name(kernel['name'])} for {kernel['arch']}"
        if kernel["stack"] or kernel["spill_stores"] or kernel["spill_loads"]:
            found.append(
                f"{where} uses local memory: {kernel['stack']} bytes stack frame, {kernel['spill_stores']} bytes spill "
                f"stores, {kernel['spill_loads']} bytes spill loads ({kernel['registers']} registers)"
            )
    return found


def read_reports(path_build_dir: Path, units: Sequence[str]) -> list[dict[str, Any]]:
    """The reports of a path's units, in the order given."""
    return [json.loads((path_build_dir / "units" / unit / "report.json").read_text(encoding="utf-8")) for unit in units]


def table(reports: Iterable[Mapping[str, Any]], shared_memory: Mapping[str, int]) -> list[str]:
    """Lines of the table printed after a build.

    Parameters
    ----------
    reports : iterable of mapping
        What `read_reports` returned.
    shared_memory : mapping of str to int
        Bytes per CTA, static and dynamic, of the units that are in the registry.

    Returns
    -------
    list of str
        A header, a rule, a line for each unit, kernel and set of architectures with the same numbers, and a sum.
    """
    header = ("kernel", "arch", "registers", "shared", "spills", "CPU s", "KB")
    rows: list[tuple[str, ...]] = []
    seconds, size = 0.0, 0
    for report in reports:
        unit = report["unit"]
        seconds, size = seconds + report["seconds"], size + report["bytes"]
        merged: dict[tuple[Any, ...], list[str]] = {}
        for kernel in report["kernels"]:
            spills = kernel["stack"] + kernel["spill_stores"] + kernel["spill_loads"]
            numbers = (kernel["name"], kernel["registers"], kernel["shared_memory"], spills)
            merged.setdefault(numbers, []).append(kernel["arch"])
        names = list(dict.fromkeys(numbers[0] for numbers in merged))
        several = len(names) > 1
        by_name = sorted(merged.items(), key=lambda item: names.index(item[0][0]))
        for number, ((name, registers, static, spills), archs) in enumerate(by_name):
            rows.append(
                (
                    f"{unit}: {short_name(name)}" if several else unit,
                    " ".join(arch.removeprefix("sm_") for arch in archs),
                    str(registers),
                    str(static if several else shared_memory.get(unit, static)),
                    str(spills),
                    (f"{report['seconds']:.1f}" + (" (cached)" if report["cached"] else "")) if number == 0 else "",
                    f"{report['bytes'] / 1024:.0f}" if number == 0 else "",
                )
            )
        if not merged:
            rows.append((unit, "", "", "", "", f"{report['seconds']:.1f}", f"{report['bytes'] / 1024:.0f}"))
    rows.append(("sum", "", "", "", "", f"{seconds:.1f}", f"{size / 1024:.0f}"))
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        aligned = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
        aligned += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
        return "  ".join(aligned).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return [line(header), rule, *(line(row) for row in rows[:-1]), rule, line(rows[-1])]


def write_manifest(
    path_build_dir: Path, path: str, gencode: str, units: Mapping[str, str], host_objects: Sequence[str]
) -> None:
    """Write manifest.json: what was compiled into a path's library and where its objects and PTX lie.

    Parameters
    ----------
    path_build_dir : Path
        ``build/<path>``; every path in the manifest is relative to it.
    path, gencode : str
        As in csrc/kernels.toml.
    units : mapping of str to str
        Unit name to its source file.
    host_objects : sequence of str
        Objects of csrc/api and of the registry.

    Raises
    ------
    ManifestError
        A unit's PTX is older than its object: it would not be what the library runs.
    """
    entries = []
    for unit, source in units.items():
        object_file, ptx_file = (path_build_dir / "units" / unit / f"{unit}{suffix}" for suffix in (".o", ".ptx"))
        if ptx_file.stat().st_mtime_ns < object_file.stat().st_mtime_ns:
            raise ManifestError(f"{ptx_file} is older than its object; delete {object_file.parent} and build again")
        text = ptx_file.read_text(encoding="utf-8")
        entries.append(
            {
                "unit": unit,
                "source": source,
                "kernels": re.findall(r"^\s*(?:\.visible\s+|\.weak\s+)?\.entry\s+([\w$]+)", text, re.MULTILINE),
                "object": f"units/{unit}/{unit}.o",
                "ptx": f"units/{unit}/{unit}.ptx",
            }
        )
    manifest = {"path": path, "gencode": gencode, "units": entries, "host_objects": list(host_objects)}
    (path_build_dir / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


class _KernelInfo(ctypes.Structure):
    """flash_ext::KernelInfo of csrc/api/abi.h."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("path", ctypes.c_char_p),
        ("direction", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("head_dim_v", ctypes.c_int32),
        ("block_m", ctypes.c_int32),
        ("block_n", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("warps", ctypes.c_int32),
        ("features", ctypes.c_uint32),
        ("shared_memory", ctypes.c_int64),
        ("workspace", ctypes.c_void_p),
        ("launch", ctypes.c_void_p),
    ]


def library_kernels(library: Path) -> list[dict[str, Any]]:
    """What a built library answers from ``flash_ext_kernels``: name, head dims, features and shared memory of each."""
    handle = ctypes.CDLL(str(library))
    function = handle.flash_ext_kernels
    function.restype = ctypes.POINTER(_KernelInfo)
    count = ctypes.c_int32(0)
    kernels = function(ctypes.byref(count))
    fields = ("direction", "dtype", "head_dim", "head_dim_v", "features", "shared_memory")
    return [
        {"name": kernels[i].name.decode(), **{field: getattr(kernels[i], field) for field in fields}}
        for i in range(count.value)
    ]


def fallback_problems(kernels: Iterable[Mapping[str, Any]]) -> list[str]:
    """Which (direction, dtype, head dims, features) of sm80 have no tile within the smallest GPU's shared memory."""
    smallest: dict[tuple[Any, ...], tuple[int, str]] = {}
    for kernel in kernels:
        key = tuple(kernel[field] for field in ("direction", "dtype", "head_dim", "head_dim_v", "features"))
        candidate = (kernel["shared_memory"], kernel["name"])
        smallest[key] = min(smallest.get(key, candidate), candidate)
    return [
        f"{name} is the smallest tile of its head dims and needs {size} bytes of shared memory; one of at most "
        f"{SM80_SHARED_MEMORY} is required, for the GPUs that have no more (8.6, 8.9, 12.0)"
        for size, name in smallest.values()
        if size > SM80_SHARED_MEMORY
    ]
