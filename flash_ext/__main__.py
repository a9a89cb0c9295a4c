"""The command line: ``python -m flash_ext demo | info | bench``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# Command -> module with `add_arguments` and `run`, what it does, what it needs beside flash_ext's own requirements.
COMMANDS = {
    "demo": ("flash_ext.demo.show", "show what this machine runs, check it, and use it on real input", "rich"),
    "info": ("flash_ext.info", "print versions, GPU, paths and kernels", ""),
    "bench": ("flash_ext.bench.cli", "measure speed beside PyTorch's own attention", "rich matplotlib"),
}
PATHS = ("sm80", "sm90", "sm100", "cpu")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0 done, 1 something is wrong with the results, 2 bad usage."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m flash_ext", description="Exact attention for PyTorch.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(COMMANDS) + "}")
    # Only the module of the command at hand is imported: each needs other packages.
    wanted = next((argument for argument in given if argument in COMMANDS), None)
    for name, (module, summary, packages) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        command.add_argument("--path", choices=PATHS, help="force a path, as FLASH_EXT_PATH does")
        if name == wanted:
            try:
                implementation = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if error.name is None or error.name.split(".")[0] not in packages.split():
                    raise
                print(f"flash_ext: {name} needs {error.name}: pip install {packages}", file=sys.stderr)
                return 2
            implementation.add_arguments(command)
            command.set_defaults(run=implementation.run)
    options = parser.parse_args(given)
    _force_path(options.path, given)
    try:
        return int(options.run(options))
    except (ValueError, ModuleNotFoundError) as error:
        print(error, file=sys.stderr)
        return 2


def _force_path(path: str | None, given: list[str]) -> None:
    """Starts the command anew with FLASH_EXT_PATH set: flash_ext has read it by now, once and for all."""
    if path is not None and os.environ.get("FLASH_EXT_PATH") != path:
        sys.stdout.flush()
        environment = {**os.environ, "FLASH_EXT_PATH": path}
        os.execve(sys.executable, [sys.executable, "-m", "flash_ext", *given], environment)


if __name__ == "__main__":
    sys.exit(main())
