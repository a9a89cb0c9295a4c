"""Linking against an older glibc: what is asked of the system afterwards, that it runs here, and what is refused."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
from helpers.processes import run

import glibc
import native_build
import toolchain
from glibc import Symbol

# C++ that uses what is new since 2.28: threads and dlopen moved, libstdc++ asks for the number of threads, and for the
# size of a file.
SOURCE = """
#include <dlfcn.h>
#include <cmath>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

extern "C" int answer(const char* text) {
    static std::once_flag once;
    static auto sum = std::make_shared<int>(0);
    std::thread([copy = sum] { std::call_once(once, [&copy] { *copy += 40; }); }).join();
    try {
        if (dlopen("/nowhere.so", RTLD_NOW) == nullptr) throw std::string(text);
    } catch (const std::string& message) {
        *sum += static_cast<int>(std::pow(2.0, static_cast<double>(message.size())));
    }
    std::ifstream file("/proc/self/exe");
    return file.rdbuf()->in_avail() > 0 ? *sum : -1;
}
"""
OLDER = (2, 28)


def own_version() -> tuple[int, ...]:
    """Of this machine's glibc; empty: another C library."""
    text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    return tuple(int(part) for part in re.findall(r"\d+", text)) if text.startswith("glibc") else ()


needs_newer_glibc = pytest.mark.skipif(own_version() <= OLDER, reason="this system's glibc is not newer than 2.28")


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that links a shared library against glibc 2.28 as CMakeLists.txt does, but for the files."""
    folder = tmp_path_factory.mktemp("stubs")
    command = native_build.find_cxx()[0]
    glibc.write_stubs(OLDER, folder, command)
    options = [f"-L{folder}", "-static-libstdc++", "-Wl,--as-needed", "-Wl,--no-undefined"]
    return [*command, "-std=c++17", "-O2", "-fPIC", "-shared", *options]


@needs_newer_glibc
def test_a_library_needs_no_newer_symbol_and_runs(link: list[str], tmp_path: Path) -> None:
    source, library = tmp_path / "answer.cpp", tmp_path / "answer.so"
    source.write_text(SOURCE)
    result = run([*link, str(source), "-o", str(library), "-pthread"])
    assert result.returncode == 0, result.stderr

    symbols = run(["readelf", "--dyn-syms", "--wide", str(library)]).stdout
    imported = dict(re.findall(r"UND (\w+)@(\S+)", symbols))
    assert imported["dlopen"] == imported["pthread_create"] == "GLIBC_2.2.5"
    glibc.check_imports(library, OLDER)
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "--dynamic", str(library)]).stdout))
    assert (
        {"libdl.so.2", "libpthread.so.0", "libc.so.6"}
        <= needed
        <= {*glibc.LIBRARIES, "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
    )
    assert ctypes.CDLL(str(library)).answer(b"a") == 42


@needs_newer_glibc
def test_what_came_later_is_an_undefined_reference(link: list[str], tmp_path: Path) -> None:
    source = tmp_path / "newer.cpp"
    source.write_text('#include <unistd.h>\nextern "C" int newer() { return static_cast<int>(gettid()); }\n')  # 2.30
    result = run([*link, str(source), "-o", str(tmp_path / "newer.so")])
    assert result.returncode != 0 and "undefined reference to `gettid'" in result.stderr


@needs_newer_glibc
def test_a_library_that_needs_newer_symbols_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "newer.cpp"
    source.write_text('#include <unistd.h>\nextern "C" int newer() { return static_cast<int>(gettid()); }\n')
    link = [*native_build.find_cxx()[0], "-fPIC", "-shared", str(source)]
    for name, options in {"newer.so": [], "unresolved.so": ["-nostdlib"]}.items():
        assert run([*link, *options, "-o", str(tmp_path / name)]).returncode == 0
        with pytest.raises(toolchain.BuildError, match=f"{name} needs what glibc 2.28 .* does not have: gettid"):
            glibc.check_imports(tmp_path / name, OLDER)


def test_a_symbol_gets_its_newest_version_that_is_old_enough_and_the_library_it_was_in() -> None:
    def symbol(name: str, *version: int) -> Symbol:
        return Symbol(name, version, False, 1)

    libc = [symbol("memcpy", 2, 2, 5), symbol("memcpy", 2, 14), symbol("dlopen", 2, 2, 5), symbol("dlopen", 2, 34)]
    libc += [symbol("gettid", 2, 30), symbol("sem_wait", 2, 34), symbol("sem_wait", 2, 2, 5), symbol("free", 2, 2, 5)]
    libm = [symbol("exp", 2, 2, 5), symbol("exp", 2, 29)]
    stubs = glibc.stub_symbols({"libc.so.6": libc, "libm.so.6": libm}, OLDER)
    assert {library: [(found.name, found.version) for found in symbols] for library, symbols in stubs.items()} == {
        "libc.so.6": [("free", (2, 2, 5)), ("memcpy", (2, 14))],
        "libm.so.6": [("exp", (2, 2, 5))],
        "libdl.so.2": [("dlopen", (2, 2, 5))],
        "libpthread.so.0": [("sem_wait", (2, 2, 5))],
        "librt.so.1": [],
    }


def test_symbols_as_readelf_prints_them() -> None:
    text = """
       Num:    Value          Size Type    Bind   Vis      Ndx Name
         1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND __tls_get_addr@GLIBC_2.3 (37)
        45: 0000000000083f10   190 FUNC    GLOBAL DEFAULT   15 dlopen@GLIBC_2.2.5
        46: 0000000000083f10   190 FUNC    GLOBAL DEFAULT   15 dlopen@@GLIBC_2.34
        47: 00000000001d3ac0     8 OBJECT  WEAK   DEFAULT   30 environ@@GLIBC_2.2.5
        48: 0000000000000010     4 TLS     GLOBAL DEFAULT   21 errno@@GLIBC_PRIVATE
        49: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  ABS GLIBC_2.2.5
        50: 0000000000000018     8 TLS     GLOBAL DEFAULT   21 something@@GLIBC_2.2.5
    """
    assert glibc.parse_symbols(text) == [
        Symbol("dlopen", (2, 2, 5), False, 190),
        Symbol("dlopen", (2, 34), False, 190),
        Symbol("environ", (2, 2, 5), True, 8),
    ]


@needs_newer_glibc
def test_the_option_names_a_version() -> None:
    assert toolchain.read_options({"FLASH_EXT_GLIBC": "2.28"}).glibc == OLDER
    assert toolchain.read_options({"FLASH_EXT_GLIBC": ""}).glibc == ()
    newer = f"2.{own_version()[1] + 1}"
    assert toolchain.read_options({"FLASH_EXT_GLIBC": newer}).glibc == ()  # this machine's own serves


@pytest.mark.parametrize("value", ["2", "2.5", "2.28.1", "3.0", "latest"])
def test_another_value_is_refused_by_name(value: str) -> None:
    with pytest.raises(toolchain.BuildError, match=rf"FLASH_EXT_GLIBC='{value}'"):
        toolchain.read_options({"FLASH_EXT_GLIBC": value})
