"""Links against an older glibc than this machine's: stubs of its libraries, with the symbols of then alone.

A library that is linked the ordinary way asks for the newest version of each symbol (``dlopen@GLIBC_2.34``), and
systems with an older glibc refuse it. glibc keeps every version that a symbol ever had, with the same meaning. So for
each symbol the stubs offer the newest version that is old enough (``dlopen@GLIBC_2.2.5``), in the library where it was
then (``libdl.so.2``), and leave out symbols that are newer: who uses one gets an undefined reference from the linker.

The headers stay this machine's. libstdc++ is as new as the compiler, so it is linked statically (CMakeLists.txt);
libgcc_s.so.1 is left to the system: the static one finds exceptions by means of glibc 2.35.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from toolchain import BuildError

# glibc 2.34 moved these libraries into libc.so.6: names that got a version of 2.34 then were in the library given here.
MERGED = (2, 34)
HOMES = (
    (re.compile(r"dl"), "libdl.so.2"),
    (re.compile(r"(__)?pthread_|sem_"), "libpthread.so.0"),
    (re.compile(r"aio_|lio_|mq_|shm_|timer_"), "librt.so.1"),
)
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1")
# What a newer libstdc++.a wants of a newer glibc, by older means; a file each, so that only what is used is linked.
SUBSTITUTES = {
    # 2.32: whether the process has one thread, so that atomic instructions may be left out. 0: it may have more.
    "single_threaded": 'extern "C" { __attribute__((visibility("hidden"))) char __libc_single_threaded = 0; }\n',
    # 2.36, for std::random_device, which the instances of std::string pull in.
    "arc4random": """#include <unistd.h>
#include <cstdlib>
extern "C" __attribute__((visibility("hidden"))) unsigned arc4random() noexcept {
    unsigned value;
    if (getentropy(&value, sizeof value) != 0) std::abort();
    return value;
}
""",
    # 2.33, for files of iostream; before, headers made it a call of __fxstat64. 1: the only layout of x86-64.
    "fstat64": """extern "C" int __fxstat64(int version, int file, void* status) noexcept;
extern "C" __attribute__((visibility("hidden"))) int fstat64(int file, void* status) noexcept {
    return __fxstat64(1, file, status);
}
""",
}
DEFINED = re.compile(
    r"\s*\d+: \S+\s+(?P<size>\d+) (?P<kind>\w+)\s+(?:GLOBAL|WEAK)\s+\w+\s+(?!UND)\S+ "
    r"(?P<name>[^@\s]+)@@?GLIBC_(?P<version>[\d.]+)$"
)

Version = tuple[int, ...]


@dataclass(frozen=True)
class Symbol:
    """A symbol of a shared library in one of its versions."""

    name: str
    version: Version
    is_object: bool
    size: int


def parse_version(text: str) -> Version:
    """``"2.28"`` as ``(2, 28)``."""
    return tuple(int(part) for part in text.split("."))


def parse_symbols(text: str) -> list[Symbol]:
    """What ``readelf --dyn-syms --wide`` says is defined with a version of glibc; thread-local symbols are left out."""
    matches = filter(None, map(DEFINED.match, text.splitlines()))
    return [
        Symbol(match["name"], parse_version(match["version"]), match["kind"] == "OBJECT", int(match["size"]))
        for match in matches
        if match["kind"] != "TLS"
    ]


def stub_symbols(libraries: dict[str, list[Symbol]], glibc: Version) -> dict[str, list[Symbol]]:
    """What each stub offers.

    Parameters
    ----------
    libraries : dict of str to list of Symbol
        Name of a library of this machine's glibc to all that it defines.
    glibc : tuple of int
        The version that is linked against, e.g. ``(2, 28)``.

    Returns
    -------
    dict of str to list of Symbol
        Name of a library of then to its symbols, each in the newest version that it had.
    """
    stubs: dict[str, dict[str, Symbol]] = {name: {} for name in LIBRARIES}
    for library, symbols in libraries.items():
        newest: dict[str, Version] = {}
        for symbol in symbols:
            newest[symbol.name] = max(newest.get(symbol.name, ()), symbol.version)
        for symbol in symbols:
            if symbol.version > glibc:
                continue
            home = library
            if library == "libc.so.6" and newest[symbol.name] >= MERGED > glibc:
                home = next((home for pattern, home in HOMES if pattern.match(symbol.name)), library)
            kept = stubs[home].get(symbol.name)
            if kept is None or kept.version < symbol.version:
                stubs[home][symbol.name] = symbol
    return {library: [found[name] for name in sorted(found)] for library, found in stubs.items()}


def assembly(symbols: Iterable[Symbol]) -> str:
    """Source of a stub: every symbol with its version and kind, and nothing behind it."""
    lines = [".text"]
    for number, symbol in enumerate(symbols):
        kind = "object" if symbol.is_object else "function"
        lines += [f".globl stub{number}", f".type stub{number}, @{kind}", f".size stub{number}, {max(symbol.size, 1)}"]
        lines += [f"stub{number}: .byte 0", f".symver stub{number}, {symbol.name}@@{_node(symbol.version)}, remove"]
    return "\n".join(lines) + "\n"


def write_stubs(glibc: Version, folder: Path, compiler: list[str]) -> None:
    """Make the stubs of a version in a folder, for ``-L``.

    Parameters
    ----------
    glibc : tuple of int
        The version, older than this machine's.
    folder : Path
        Where they are made; it holds them and nothing else.
    compiler : list of str
        The C++ compiler that links against them, a driver like g++: it says where this machine's glibc lies.

    Raises
    ------
    BuildError
        A tool or a library of glibc is missing, or cannot do it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    libraries = {}
    for name in LIBRARIES:
        text = _run(["readelf", "--dyn-syms", "--wide", _find(name, compiler)])
        libraries[name] = parse_symbols(text)
    for name, symbols in stub_symbols(libraries, glibc).items():
        source, script = folder / f"{name}.s", folder / f"{name}.map"
        source.write_text(assembly(symbols), encoding="utf-8")
        versions = sorted({symbol.version for symbol in symbols})
        script.write_text("".join(f"{_node(version)} {{}};\n" for version in versions), encoding="utf-8")
        link = [*compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"]
        _run([*link, "-o", str(folder / name), str(source)])
        development = folder / f"{name.partition('.')[0]}.so"  # what -ldl looks for
        development.unlink(missing_ok=True)
        if name != "libc.so.6":
            development.symlink_to(name)

    objects = []
    for name, text in SUBSTITUTES.items():
        source, object_file = folder / f"{name}.cpp", folder / f"{name}.o"
        source.write_text(text, encoding="utf-8")
        _run([*compiler, "-O2", "-fPIC", "-c", str(source), "-o", str(object_file)])
        objects.append(str(object_file))
    archive = folder / "libsubstitutes.a"
    archive.unlink(missing_ok=True)
    _run(["ar", "rcD", str(archive), *objects])
    # -lc is a linker script, as glibc's own is, and the last thing that a driver links: what libc.so.6 held only later
    # is looked for here, too.
    always = [str(folder / "libc.so.6"), str(archive), _find("libc_nonshared.a", compiler)]
    if_used = [str(folder / name) for name in LIBRARIES if name != "libc.so.6"]
    if_used.append(_find("ld-linux-x86-64.so.2", compiler))
    script = folder / "libc.so"
    script.write_text(f"GROUP ( {_quoted(always)} AS_NEEDED ( {_quoted(if_used)} ) )\n", encoding="utf-8")


def check_imports(library: Path, glibc: Version) -> None:
    """Refuse a library or Python module that asks for what this glibc does not have.

    Raises
    ------
    BuildError
        It names the symbols.
    """
    newer = []
    for line in _run(["readelf", "--dyn-syms", "--wide", str(library)]).splitlines():
        match = re.search(r" GLOBAL \w+\s+UND (\w+)(?:@(\w+?)_([\d.]+))?", line)
        if match is None:
            continue
        name, family, version = match.groups()
        # Without a version the linker found it nowhere: Python's own functions are the interpreter's to give.
        if (family is None and not re.match(r"_?Py", name)) or (family == "GLIBC" and parse_version(version) > glibc):
            newer.append(name)
    if newer:
        raise BuildError(
            f"{library.name} needs what glibc {'.'.join(map(str, glibc))} (FLASH_EXT_GLIBC) does not have: "
            + ", ".join(newer)
        )


def _quoted(files: list[str]) -> str:
    return " ".join(f'"{file}"' for file in files)


def _find(name: str, compiler: list[str]) -> str:
    found = _run([*compiler, f"-print-file-name={name}"]).strip()
    if not Path(found).is_absolute():  # which repeats a name that it does not find
        raise BuildError(f"FLASH_EXT_GLIBC: {compiler[0]} finds no {name}; that takes an x86-64 system with glibc")
    return found


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except OSError as error:
        raise BuildError(
            f"FLASH_EXT_GLIBC needs {command[0]}, which does not run ({error}); install binutils"
        ) from None
    except subprocess.CalledProcessError as error:
        raise BuildError(f"FLASH_EXT_GLIBC: {' '.join(command)} failed:\n{error.stderr.strip()}") from None


def _node(version: Version) -> str:
    return "GLIBC_" + ".".join(str(part) for part in version)
