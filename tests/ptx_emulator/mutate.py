"""Removes one synchronisation instruction of a kernel at a time and sees whether anything notices.

``python -m tests.ptx_emulator.mutate --path sm80`` runs every kernel of the emulated library on a few small cases that
execute all of its barriers, waits, commits and fences; then, for each of them, the same cases without it (an access
with an order, ``ld.acquire`` or ``red.release``, is relaxed then). Noticed means: the happens-before checker reports a
hazard, the launch deadlocks or breaks another rule, or a result changes.
What nobody notices must be listed in ``redundant_synchronization.toml`` with the reason; the run fails on an unlisted
one, on a listed one that is noticed after all, and on an instruction that no case executes. Kernels whose PTX differs
in the names of the types alone (fp16, bf16; in descriptors too) are one kernel here: the cases run on each, the
mutations on the first.
"""

from __future__ import annotations

import argparse
import ctypes
import fnmatch
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from .settings import environment, forced_tile

if TYPE_CHECKING:
    from torch import Tensor

REDUNDANT_FILE = Path(__file__).parent / "redundant_synchronization.toml"
# Of a kernel's synchronisation instructions: beyond it the cases or the checker miss something, or the kernel waits for
# nothing too often.
MOST_REDUNDANT = 0.05
_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# An instruction descriptor of tcgen05.mma in decimal (PTX ISA 9.7.16.4.2: fp32 accumulator, bf16 operands, M of 128 or
# 256 in the upper byte), and the bits that make the operands fp16.
_DESCRIPTOR = re.compile(r"(?<![\w.%$])\d{9}\b")
_DESCRIPTOR_TYPES = 1 << 7 | 1 << 10


@dataclass(frozen=True)
class Instruction:
    """One synchronisation instruction of a kernel.

    Attributes
    ----------
    number : int
        Its place among the kernel's synchronisation instructions.
    executed : bool
        Whether a launch has executed it since the instructions were last asked for.
    line : int
        Line of the PTX file.
    source : str
        ``file:line`` in a build with line information, else empty.
    text : str
        The instruction.
    ordinal : int
        Its place among the kernel's instructions with the same opcode: with the opcode, how it is listed.
    """

    number: int
    executed: bool
    line: int
    source: str
    text: str
    ordinal: int

    @property
    def opcode(self) -> str:
        """The instruction's opcode, without a guard."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]

    def __str__(self) -> str:
        where = f"{self.source} " if self.source else ""
        return f"#{self.number} {where}PTX:{self.line} {self.text} [{self.opcode} {self.ordinal}]"


@dataclass
class Outcome:
    """What happened without one instruction: ``reason`` is empty if nobody noticed."""

    instruction: Instruction
    reason: str


@dataclass
class Report:
    """The outcomes for one kernel, by the name that ``flash_ext.kernels()`` gives it."""

    kernel: str
    symbol: str
    outcomes: list[Outcome] = field(default_factory=list)
    not_executed: list[Instruction] = field(default_factory=list)
    twin: str = ""  # the kernel with the same text whose outcomes these are

    @property
    def unnoticed(self) -> list[Instruction]:
        """Instructions whose removal nobody noticed."""
        return [outcome.instruction for outcome in self.outcomes if not outcome.reason]


class EmulatedLibrary:
    """What an emulated library tells about its kernels (``src/runtime_inspection.cpp``)."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        lines = path.with_suffix(".ptx_index").read_text(encoding="utf-8").splitlines()
        # Mangled name to the unit whose PTX has it: the kernel's own name, or that of the helpers.
        self._files = {symbol: path.parent / file for symbol, file in (line.split("\t") for line in lines)}
        self.units = {symbol: file.stem for symbol, file in self._files.items()}
        for function in ("launched", "synchronization"):
            getattr(self._library, f"flash_ext_emulator_{function}").restype = ctypes.c_uint64

    def _text(self, function: str, *arguments: bytes) -> str | None:
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            needed = getattr(self._library, f"flash_ext_emulator_{function}")(*arguments, buffer, ctypes.c_uint64(size))
            if needed <= size:
                return buffer.value.decode() if needed else None
            size = int(needed)

    def typeless_text(self, symbol: str) -> str:
        """The PTX of a kernel that is alone in its file, without what names its type."""
        text = self._files[symbol].read_text(encoding="utf-8")
        text = re.sub(r"^//.*\n", "", text[text.index(".entry") :], flags=re.MULTILINE)
        text = re.sub(r"bf16", "f16", text.replace(symbol, ""))
        return _DESCRIPTOR.sub(lambda match: _typeless_descriptor(match[0]), text)

    def launched(self) -> list[str]:
        """Mangled names of the kernels launched since the last call."""
        return list(dict.fromkeys((self._text("launched") or "").split()))

    def synchronization(self, symbol: str) -> list[Instruction]:
        """The synchronisation instructions of a kernel. Raises ValueError if it does not load."""
        text = self._text("synchronization", symbol.encode())
        if text is None:
            raise ValueError(f"the emulator does not load {symbol}")
        instructions: list[Instruction] = []
        seen: dict[str, int] = {}
        for line in text.splitlines():
            number, executed, ptx_line, source, body = line.split("\t")
            entry = Instruction(int(number), executed == "1", int(ptx_line), source, body, 0)
            ordinal = seen[entry.opcode] = seen.get(entry.opcode, -1) + 1
            instructions.append(Instruction(entry.number, entry.executed, entry.line, source, body, ordinal))
        return instructions


def _typeless_descriptor(number: str) -> str:
    value = int(number)
    is_descriptor = value & 0x7FFF == 1 << 4 | _DESCRIPTOR_TYPES and value >> 24 in (128 // 16, 256 // 16)
    return str(value & ~_DESCRIPTOR_TYPES) if is_descriptor else number


def _calls(kernel: dict[str, Any]) -> list[dict[str, Any]]:
    """Small calls that reach a kernel and together take each of its loops: full, causal, windowed, with more than two
    blocks of keys and of queries, and with one of keys; tiles of which some warps see no key; more tiles for a
    persistent CTA than its rings have places; maxima that grow by enough for O to be rescaled where that is done
    seldom; sequences that end inside of a block; key tiles that have no CTA, for lengths that do not ascend; and what
    only the variant of the kernel can do."""
    rows, keys = kernel["block_m"] + 5, 3 * kernel["block_n"] + 9
    calls: list[dict[str, Any]] = [
        {"rows": rows, "keys": keys},
        {"rows": rows, "keys": keys, "causal": True},
        {"rows": 2 * rows, "keys": 2 * keys, "window_size": (kernel["block_n"] + 3, 5)},
    ]
    if kernel["direction"] == "backward":
        calls += [{"rows": 3 * rows, "keys": keys, "deterministic": True, "causal": causal} for causal in (False, True)]
        calls.append({"rows": rows, "keys": keys, "sinks": True})
        # The queries of one sequence end with a block, its keys do not: what is done for the one covers the other else.
        calls.append({"rows": 2 * kernel["block_m"], "keys": keys, "sequences": 3})
        calls.append({"rows": rows, "keys": keys, "sequences": 3, "deterministic": True, "hides_tiles": True})
    else:
        calls.append({"rows": rows, "keys": keys, "peaked": 16.0})
        many = {"heads": 12, "rows": kernel["block_m"]}
        calls += [
            {**many, "keys": kernel["block_m"] - kernel["block_m"] // 2 + 6, "causal": True},
            {**many, "keys": kernel["block_m"] // 2 - 6, "causal": True},
            {**many, "keys": kernel["block_n"] - 6},
            {**many, "keys": 2 * kernel["block_n"], "window_size": (0, 0)},
            {**many, "keys": kernel["block_m"] + kernel["block_n"] + 12, "window_size": (40, 50)},
            {**many, "rows": 2 * kernel["block_m"], "keys": 2 * kernel["block_m"] - 70, "causal": True},
            {**many, "rows": 2 * kernel["block_m"], "keys": 2 * kernel["block_n"] - 6, "causal": True},
            _tiles_without_keys(kernel),
        ]
        calls.append({"rows": rows, "keys": keys, "sequences": 3})
    if "softcap" in kernel["features"]:
        for call in calls:
            call["softcap"] = 20.0
    return calls


def _tiles_without_keys(kernel: dict[str, Any]) -> dict[str, Any]:
    """One CTA walks the two tiles of each head. Of the first tile's rows the first 64 see no key; the first 64 of the
    second tile end with a block of keys, and the last 64 go on into another. So a consumer warpgroup goes from tiles in
    which it only hands blocks back, the CTA's first among them, to tiles in which it hands one back before its own."""
    block_m, block_n = kernel["block_m"], kernel["block_n"]
    shift = block_m // block_n * block_n - block_m - 64
    keys = max(2 * block_m + shift - 6, 6)  # tiles with more keys than rows are of one warpgroup, which skips no block
    return {"heads": 3, "rows": 2 * block_m, "keys": keys, "window_size": (40, 6), "sm_margin": 1}


def _prepare(kernel: dict[str, Any], call: dict[str, Any]) -> Callable[[], list[Tensor]]:
    """One call on inputs of its own; each run gives the results: out and lse, or the gradients. The tile is forced in
    the kernel's own direction."""
    import torch

    import flash_ext

    options = dict(call)
    rows, keys, has_sinks = options.pop("rows"), options.pop("keys"), options.pop("sinks", False)
    heads, sequences, peaked = options.pop("heads", 2), options.pop("sequences", 0), options.pop("peaked", 1.0)
    hides_tiles = options.pop("hides_tiles", False)
    generator = torch.Generator().manual_seed(rows * 1000 + keys)
    dtype = getattr(torch, _DTYPES[kernel["dtype"]])
    tile = (kernel["block_m"], kernel["block_n"])

    def random(length: int, heads: int, head_dim: int) -> Tensor:
        return torch.randn(1, length, heads, head_dim, generator=generator).to(dtype)

    q = peaked * random(rows, heads, kernel["head_dim"])
    k, v = random(keys, 1, kernel["head_dim"]), random(keys, 1, kernel["head_dim_v"])
    # Of lengths 0, 1/2 and the rest; behind the last there are more rows.
    starts = [
        torch.tensor([0, 0, length // 2, length - 3][: sequences + 1], dtype=torch.int32) for length in (rows, keys)
    ]
    if hides_tiles:
        starts[0] = torch.tensor([0, rows // 2, rows // 2 + 5, rows], dtype=torch.int32)
        starts[1] = torch.tensor([0, keys * 3 // 4, keys // 10, keys], dtype=torch.int32)
    if sequences:
        q, k, v = q[0], k[0], v[0]

    if kernel["direction"] == "forward":

        def run_forward() -> list[Tensor]:
            with forced_tile(*tile):
                if not sequences:
                    return list(flash_ext.flash_attn_func(q, k, v, return_lse=True, **options))
                return list(
                    flash_ext.flash_attn_varlen_func(
                        q, k, v, starts[0], starts[1], rows, keys, return_lse=True, **options
                    )
                )

        return run_forward

    options["window_left"], options["window_right"] = options.pop("window_size", (-1, -1))
    if has_sinks:
        options["sinks"] = torch.tensor([0.5, -0.5])
    if sequences:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = starts
    out, lse = torch.ops.flash_ext.fwd(q, k, v, **options)
    dout = random(rows, heads, kernel["head_dim_v"])[0 if sequences else slice(None)]
    settings = {"FLASH_EXT_EMULATOR_DETERMINISTIC": str(int(options.get("deterministic", False)))}
    if hides_tiles:  # and sequences share rows, which two CTAs write or none
        settings = {"FLASH_EXT_EMULATOR_CHECK": "0", "FLASH_EXT_EMULATOR_SCHEDULE": SCHEDULES[0]}

    def run_backward() -> list[Tensor]:
        with forced_tile(*tile), environment(**settings):
            results = list(torch.ops.flash_ext.bwd(dout, None, q, k, v, out, lse, **options))
        return [] if hides_tiles else results  # there only whether the call ends is looked at

    return run_backward


@dataclass
class Case:
    """A call that reaches a kernel.

    Attributes
    ----------
    run : callable
        Makes the call.
    expected : list of Tensor
        What it gives on the unchanged kernel.
    executed : dict
        Mangled name of a kernel to the numbers of the synchronisation instructions that the call executes under the
        first of SCHEDULES.
    seconds : float
        How long it takes.
    """

    run: Callable[[], list[Tensor]]
    expected: list[Tensor]
    executed: dict[str, set[int]]
    seconds: float


def _same(actual: Tensor, expected: Tensor) -> bool:
    """Equal but for the order in which gradients are added up."""
    a, b = actual.double(), expected.double()
    finite = b.isfinite()
    if not bool((a.isfinite() == finite).all()):
        return False
    scale = float(b[finite].abs().max()) if bool(finite.any()) else 0.0
    return float((a[finite] - b[finite]).abs().max()) <= 0.01 * scale if scale else True


# What a mutation is run under until something notices it: the later ones only for what survives the first.
SCHEDULES = ("lazy", "eager", "pct 1", "pct 2", "pct 3", "random 1", "random 2")


def _reason(cases: Sequence[Case], symbol: str, number: int) -> str:
    """Why a changed kernel is noticed, or an empty string."""
    for schedule in SCHEDULES:
        name, _, seed = schedule.partition(" ")
        with environment(FLASH_EXT_EMULATOR_SCHEDULE=name, FLASH_EXT_EMULATOR_SEED=seed or "0"):
            for case in cases:
                if schedule == SCHEDULES[0] and number not in case.executed.get(symbol, ()):
                    continue  # runs as it did before
                try:
                    actual = case.run()
                except RuntimeError as error:
                    return _kind(str(error))
                if not all(_same(a, b) for a, b in zip(actual, case.expected, strict=True)):
                    return "wrong result"
    return ""


def _kind(error: str) -> str:
    for word in ("hazard", "deadlock", "no progress"):
        if word in error:
            return word
    return error.split("PTX emulator: ")[-1].split("\n", 1)[0][:100]


def mutate(
    library: EmulatedLibrary,
    kernel: dict[str, Any],
    helpers: bool = False,
    done: dict[str, Report] | None = None,
    show: Callable[[str], None] = lambda line: None,
) -> list[Report]:
    """Run the mutations of one row of the registry.

    Parameters
    ----------
    library : EmulatedLibrary
        The library that flash_ext runs on in this process.
    kernel : dict
        A row of ``flash_ext.kernels()``.
    helpers : bool
        Also mutate the kernels that its calls launch beside it.
    done : dict, optional
        Reports of earlier calls by the kernel's text and calls, to which this one's are added: their outcomes are taken
        for kernels that differ in their type alone.
    show : callable
        Called with a line for each outcome.

    Returns
    -------
    list of Report
        One per kernel that was launched and has synchronisation instructions; none if no call reaches the row.
    """
    done = {} if done is None else done
    cases: list[Case] = []
    instructions: dict[str, list[Instruction]] = {}
    for call in _calls(kernel):
        try:
            run = _prepare(kernel, call)
            library.launched()
            start = time.perf_counter()
            expected = run()
        except NotImplementedError:  # the row is for masked calls alone, or for others
            continue
        case = Case(run, expected, {}, time.perf_counter() - start)
        launched = library.launched()
        if kernel["name"] not in (library.units[symbol] for symbol in launched):
            continue
        for symbol in launched:
            unit = library.units[symbol]
            if unit == kernel["name"] or (helpers and unit.endswith("_helpers")):
                instructions[symbol] = library.synchronization(symbol)
                case.executed[symbol] = {each.number for each in instructions[symbol] if each.executed}
        cases.append(case)
    cases.sort(key=lambda case: case.seconds)
    reports = []
    for symbol in instructions:
        unit = library.units[symbol]
        executed = set[int]().union(*(case.executed.get(symbol, set()) for case in cases))
        report = Report(unit, symbol)
        report.not_executed = [each for each in instructions[symbol] if each.number not in executed]
        text = f"{_calls(kernel)}\n{library.typeless_text(symbol)}" if unit == kernel["name"] else ""
        twin = done.setdefault(text, report) if text else report
        if twin is not report:
            report.twin = twin.kernel
            report.outcomes = [
                Outcome(instructions[symbol][outcome.instruction.number], outcome.reason) for outcome in twin.outcomes
            ]
            reports.append(report)
            continue
        for instruction in instructions[symbol]:
            if instruction.number not in executed:
                continue
            with environment(
                FLASH_EXT_EMULATOR_REMOVE=str(instruction.number),
                FLASH_EXT_EMULATOR_REMOVE_KERNEL=symbol,
                FLASH_EXT_EMULATOR_QUIET="1",
            ):
                outcome = Outcome(instruction, _reason(cases, symbol, instruction.number))
            report.outcomes.append(outcome)
            show(f"    {outcome.reason or 'NOT NOTICED':14} {outcome.instruction}")
        reports.append(report)
    return reports


def listed_redundancies(kernel: str) -> dict[tuple[str, int], str]:
    """(opcode, ordinal) to the reason why its removal may go unnoticed, for one kernel."""
    table = tomllib.loads(REDUNDANT_FILE.read_text(encoding="utf-8"))
    listed = {}
    for row in table.get("redundant", []):
        if any(fnmatch.fnmatch(kernel, pattern) for pattern in row["kernels"]):
            ordinals = row["ordinal"] if isinstance(row["ordinal"], list) else [row["ordinal"]]
            listed.update({(row["opcode"], ordinal): row["reason"] for ordinal in ordinals})
    return listed


def problems(report: Report) -> list[str]:
    """What makes a run fail: unlisted survivors, listed ones that are noticed, instructions that nothing executed."""
    listed = listed_redundancies(report.kernel)
    found = []
    for outcome in report.outcomes:
        entry = (outcome.instruction.opcode, outcome.instruction.ordinal)
        if not outcome.reason and entry not in listed:
            found.append(f"{report.kernel}: nothing notices the removal of {outcome.instruction}")
        if outcome.reason and entry in listed:
            found.append(f"{report.kernel}: listed as redundant, but noticed ({outcome.reason}): {outcome.instruction}")
    found += [f"{report.kernel}: no case executes {instruction}" for instruction in report.not_executed]
    unnoticed = len(report.unnoticed)
    if unnoticed > max(1.0, MOST_REDUNDANT * len(report.outcomes)):
        found.append(f"{report.kernel}: {unnoticed} of {len(report.outcomes)} are redundant, more than 5 %")
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator.mutate", description=__doc__)
    parser.add_argument("--path", required=True, choices=("sm80", "sm90", "sm100"))
    parser.add_argument("--library-dir", type=Path, help="default: build/emulator/<path>")
    parser.add_argument("--kernel", action="append", help="names as in flash_ext.kernels(); default: all")
    arguments = parser.parse_args()
    folder = arguments.library_dir or Path(__file__).parents[2] / "build" / "emulator" / arguments.path
    os.environ.update(
        FLASH_EXT_LIBRARY_DIR=str(folder),
        FLASH_EXT_EMULATE=arguments.path,
        FLASH_EXT_EMULATOR_SCHEDULE=SCHEDULES[0],
        FLASH_EXT_EMULATOR_STALL_LIMIT="2000000",  # of these small cases none is that long without any effect
    )
    import flash_ext

    library = EmulatedLibrary(folder / f"libflash_ext_{arguments.path}.so")
    failures: list[str] = []
    done: dict[str, Report] = {}
    kernels = {kernel["name"]: kernel for kernel in flash_ext.kernels() if kernel["path"] == arguments.path}
    for name in arguments.kernel or kernels:
        if name not in kernels:
            parser.error(f"--kernel is {name!r}; {folder} has {', '.join(kernels)}")
    # The helpers once: with the library's first backward, which decides whether they are launched programmatically.
    with_helpers = next((name for name, kernel in kernels.items() if kernel["direction"] == "backward"), "")
    for kernel in [kernels[name] for name in arguments.kernel or kernels]:
        reports = mutate(library, kernel, kernel["name"] == with_helpers, done, partial(print, flush=True))
        if not reports:
            failures.append(f"{kernel['name']}: no call reaches it")
        for report in reports:
            noticed = sum(bool(outcome.reason) for outcome in report.outcomes)
            twin = f" (as of {report.twin}, which differs in its type alone)" if report.twin else ""
            print(f"{report.kernel}: {noticed} of {len(report.outcomes)} removals noticed{twin}", flush=True)
            failures += problems(report)
    for line in failures:
        print(f"FAIL {line}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
