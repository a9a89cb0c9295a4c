"""What an emulated launch executed, with FLASH_EXT_EMULATOR_COUNT=1 (``src/execution_counts.h``)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CountedInstruction:
    """One instruction of a kernel, over all CTAs of a launch.

    Attributes
    ----------
    number : int
        Its place in the kernel.
    line : int
        Line of the PTX file.
    source : str
        ``file:line`` in a build with line information, else empty.
    text : str
        The instruction with its guard and operands.
    times, lanes : mapping of int to int
        Warp of the CTA to how often such warps executed it, and with how many lanes in all (those that the guard let
        through). A wait counts once, when it is over.
    sizes : mapping of (int, int, int) to int
        (warp, a, b) to how often: a bytes to b CTAs for a bulk copy, M and N for ``tcgen05.mma``, a clocks of shared
        memory for ``ld`` and ``st``.
    """

    number: int
    line: int
    source: str
    text: str
    times: Mapping[int, int]
    lanes: Mapping[int, int]
    sizes: Mapping[tuple[int, int, int], int]

    @property
    def opcode(self) -> str:
        """The opcode with its modifiers, without the guard."""
        words = self.text.split()
        return words[1] if words[0].startswith("@") else words[0]


@dataclass
class LaunchCounts:
    """One launch: the kernel's mangled name, the CTAs it had, and what they executed, in the kernel's order."""

    kernel: str
    ctas: int
    instructions: list[CountedInstruction] = field(default_factory=list)


def parse_counts(text: str) -> list[LaunchCounts]:
    """Reads what ``flash_ext_emulator_counts`` returns."""
    launches: list[LaunchCounts] = []
    for row in text.splitlines():
        columns = row.split("\t")
        if columns[0] == "launch":
            launches.append(LaunchCounts(columns[1], int(columns[2])))
            continue
        number, line, source, instruction, warps, sizes = columns
        times, lanes, sized = {}, {}, {}
        for entry in warps.split():
            warp, count, threads = map(int, entry.split(":"))
            times[warp], lanes[warp] = count, threads
        for entry in sizes.split():
            warp_text, size, count_text = entry.split(":")
            a, b = size.split("x")
            sized[int(warp_text), int(a), int(b)] = int(count_text)
        launches[-1].instructions.append(
            CountedInstruction(int(number), int(line), source, instruction, times, lanes, sized)
        )
    return launches


def take_counts(library: ctypes.CDLL) -> list[LaunchCounts]:
    """The launches that an emulated library has counted since the last call."""
    library.flash_ext_emulator_counts.restype = ctypes.c_uint64
    size = 1 << 20
    while True:
        buffer = ctypes.create_string_buffer(size)
        needed = int(library.flash_ext_emulator_counts(buffer, ctypes.c_uint64(size)))
        if needed <= size:
            return parse_counts(buffer.value.decode())
        size = needed
