"""Lists the forms of products and copies that flash_ext's kernels use and no known-good kernel from elsewhere does.

A form is an opcode, or one trait of a tensor-core operand or tensor copy: its shape, layout, swizzle, element type.
Runs with FLASH_EXT_EMULATOR_FORMS=FILE append to the file what their kernels use (``src/forms.h``)::

    python -m tests.ptx_emulator.forms collect --path sm100 --write own.txt
    FLASH_EXT_FOREIGN_KERNELS=1 FLASH_EXT_EMULATOR_FORMS=$PWD/foreign.txt pytest tests/test_ptx_emulator_foreign.py
    python -m tests.ptx_emulator.forms compare --own own.txt --foreign foreign.txt
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

# Modifiers that say nothing of what is moved where, or that mean the same as none.
_HINT = re.compile(r"\.(L2::\w+|tile|collector::\w+(::\w+)?)(?=[.]|$)")


def without_hints(files: list[Path]) -> set[str]:
    """The forms in files that runs have written, without cache hints."""
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return {_HINT.sub("", line) for line in lines if line}


def collect(path: str, file: Path) -> list[str]:
    """Run small calls that reach every kernel of a path, and write the forms they use to ``file``.

    Returns
    -------
    list of str
        The names of kernels that no call reached.
    """
    folder = Path(__file__).parents[2] / "build" / "emulator" / path
    os.environ.update(
        FLASH_EXT_LIBRARY_DIR=str(folder),
        FLASH_EXT_EMULATE=path,
        FLASH_EXT_EMULATOR_SCHEDULE="eager",
        FLASH_EXT_EMULATOR_CHECK="0",
        FLASH_EXT_EMULATOR_FORMS=str(file.resolve()),
    )
    import flash_ext

    from . import mutate

    library = mutate.EmulatedLibrary(folder / f"libflash_ext_{path}.so")
    missed = []
    for kernel in flash_ext.kernels():
        if kernel["path"] != path:
            continue
        library.launched()
        for call in mutate._calls(kernel):
            if "heads" in call:  # more tiles of the same form
                continue
            try:
                mutate._prepare(kernel, call)()
            except NotImplementedError:  # the row is for masked calls alone, or for others
                continue
        if kernel["name"] not in {library.units[symbol] for symbol in library.launched()}:
            missed.append(kernel["name"])
    return missed


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.ptx_emulator.forms", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    collecting = commands.add_parser("collect", help="what the kernels of a path use")
    collecting.add_argument("--path", required=True, choices=("sm80", "sm90", "sm100"))
    collecting.add_argument("--write", type=Path, required=True, help="the file that forms are appended to")
    comparing = commands.add_parser("compare", help="what only the own kernels use, one form a line")
    comparing.add_argument("--own", type=Path, nargs="+", required=True)
    comparing.add_argument("--foreign", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        missed = collect(arguments.path, arguments.write)
        for name in missed:
            print(f"no call reaches {name}", file=sys.stderr)
        return 1 if missed else 0
    for form in sorted(without_hints(arguments.own) - without_hints(arguments.foreign)):
        print(form)
    return 0


if __name__ == "__main__":
    sys.exit(main())
