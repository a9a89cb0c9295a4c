"""What was built: libraries, manifests, wheel and source distribution. Most of it needs `make build` to have run."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.processes import run

import generate
import native_build
import toolchain

ROOT = Path(__file__).resolve().parent.parent

BUILT = [path for path in toolchain.PATHS if (ROOT / "flash_ext" / f"libflash_ext_{path}.so").is_file()]
needs_libraries = pytest.mark.skipif(not BUILT, reason="no path library is built")


@needs_libraries
@pytest.mark.parametrize("built", BUILT)
def test_a_library_exports_its_abi_and_needs_no_cuda_library(built: str) -> None:
    library = str(ROOT / "flash_ext" / f"libflash_ext_{built}.so")
    exported = {line.split()[-1] for line in run(["nm", "--dynamic", "--defined-only", library]).stdout.splitlines()}
    headers = "".join((ROOT / "csrc" / "api" / name).read_text() for name in ("abi.h", "settings.h"))
    declared = set(re.findall(r"\b(flash_ext_\w+)\(", headers))
    assert exported == declared
    needed = re.findall(r"NEEDED.*\[(.+)\]", run(["readelf", "--dynamic", library]).stdout)
    assert not [name for name in needed if "cuda" in name or "torch" in name]


@needs_libraries
@pytest.mark.parametrize("built", BUILT)
def test_a_manifest_names_every_kernel_object_and_ptx(built: str) -> None:
    folder = ROOT / "build" / built
    manifest = json.loads((folder / "manifest.json").read_text())
    table, _ = generate.load(ROOT)
    assert {kernel.name for kernel in table.of_path(built)} <= {unit["unit"] for unit in manifest["units"]}
    for unit in manifest["units"]:
        ptx = (folder / unit["ptx"]).read_text()
        assert unit["kernels"]
        assert all(f".entry {kernel}(" in ptx for kernel in unit["kernels"])
        assert (folder / unit["object"]).stat().st_size > 0
    for file in manifest["host_objects"]:
        assert (folder / file).is_file()


@needs_libraries
@pytest.mark.parametrize("built", BUILT)
def test_a_library_describes_its_build(built: str) -> None:
    library = ctypes.CDLL(str(ROOT / "flash_ext" / f"libflash_ext_{built}.so"))
    library.flash_ext_build_info.restype = ctypes.c_char_p
    text = library.flash_ext_build_info()
    info = json.loads(text)
    assert info["version"] == native_build.read_version()
    assert built in info["options"]["paths"]
    assert set(info) == {"version", "commit", "compiler", "cuda", "gencode", "options"}
    assert str(ROOT) not in text.decode()


# A wheel packs what is built in seconds; minutes are for a machine that does much else.
builds_a_wheel = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel from this build folder, of what was built in place."""
    if not list((ROOT / "flash_ext").glob("_C*.so")):
        pytest.skip("flash_ext._C is not built")
    folder = tmp_path_factory.mktemp("wheel")
    objects = {file: file.stat().st_mtime_ns for file in (ROOT / "build").glob("*/units/*/*.o")}
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(ROOT)]
    result = run(command, FLASH_EXT_PATHS=",".join(BUILT) or "none", FLASH_EXT_PYTHONS="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert {file: file.stat().st_mtime_ns for file in objects} == objects, (
        "the wheel compiled units again: was the build up to date?"
    )
    (file,) = folder.glob("*.whl")
    return file


@builds_a_wheel
def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"flash_ext-{native_build.read_version()}-{tag}-{tag}-linux_")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"flash_ext-{native_build.read_version()}.dist-info/METADATA").decode()
    binaries = {name for name in names if ".so" in name}
    assert binaries == {
        f"flash_ext/_C{sysconfig.get_config_var('EXT_SUFFIX')}",
        *(f"flash_ext/libflash_ext_{path}.so" for path in BUILT),
    }
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "flash_ext").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert {"flash_ext/py.typed", "flash_ext/_C.pyi", "flash_ext/bench/rows.toml"} <= names
    assert {name.split("/")[0] for name in names} == {"flash_ext", f"flash_ext-{native_build.read_version()}.dist-info"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "Requires-Python: >=3.10" in metadata
    assert "Requires-Dist: torch>=2.4" in metadata


@builds_a_wheel
def test_the_wheel_runs_in_a_fresh_environment_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    assert run([sys.executable, "-m", "venv", "--without-pip", str(environment)]).returncode == 0
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    result = run([*install, str(wheel)])
    assert result.returncode == 0, result.stderr
    # torch is shared. In a folder that a .pth file names no .pth file is read: no editable flash_ext comes with it.
    (site,) = (environment / "lib").glob("python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    code = (
        "import flash_ext, torch; from flash_ext import _C; q = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16);"
        "assert torch.equal(flash_ext.flash_attn_func(q, q, q), q);"
        "print(flash_ext.__file__, sorted(_C.available_paths()))"
    )
    result = run([str(python), "-c", code], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == f"{site}/flash_ext/__init__.py {sorted(BUILT)}"


def test_the_source_distribution_holds_what_a_build_needs(tmp_path: Path) -> None:
    code = "import build_backend, sys; print(build_backend.build_sdist(sys.argv[1]))"
    result = run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, PYTHONPATH=str(ROOT / "cmake"))
    assert result.returncode == 0, result.stderr
    (file,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        archive.extractall(tmp_path)
    tree = tmp_path / f"flash_ext-{native_build.read_version()}"
    for folder in ("csrc", "cmake", "flash_ext"):
        for source in (ROOT / folder).rglob("*.*"):
            if source.suffix not in (".so", ".pyc", ".partial"):
                assert (tree / source.relative_to(ROOT)).exists(), source
    for name in ("CMakeLists.txt", "setup.py", "pyproject.toml", "README.md", "LICENSE", "Makefile"):
        assert (tree / name).is_file()
    assert not list(tree.rglob("*.so"))
    assert native_build.read_commit(tree) == native_build.read_commit(ROOT)


def test_the_commit_is_the_trees_own(tmp_path: Path) -> None:
    assert native_build.read_commit(tmp_path) == "unknown"
    (tmp_path / native_build.COMMIT_FILE).write_text("v1-3-gabc\n")
    assert native_build.read_commit(tmp_path) == "v1-3-gabc"


def test_an_archive_of_a_commit_knows_it(tmp_path: Path) -> None:
    """`git archive` fills in the file; in any other copy of the tree it says nothing."""
    (tmp_path / native_build.ARCHIVE_FILE).write_text("$Format:%H$\n")
    (tmp_path / ".gitattributes").write_text(f"{native_build.ARCHIVE_FILE} export-subst\n")
    assert native_build.read_commit(tmp_path) == "unknown"
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message", "first"]):
        assert run([*git, *command], cwd=tmp_path).returncode == 0
    assert run([*git, "archive", "--output", "tree.tar", "HEAD"], cwd=tmp_path).returncode == 0
    commit = run([*git, "rev-parse", "HEAD"], cwd=tmp_path).stdout
    with tarfile.open(tmp_path / "tree.tar") as archive:
        archive.extractall(tmp_path / "archive")
    assert native_build.read_commit(tmp_path / "archive") == commit[:12]


def test_replacing_a_library_leaves_the_loaded_one_alone(tmp_path: Path) -> None:
    built, installed = tmp_path / "built.so", tmp_path / "installed.so"
    built.write_bytes(b"old")
    native_build.replace_file(built, installed)
    with open(installed, "rb") as loaded:
        first = os.fstat(loaded.fileno()).st_ino
        native_build.replace_file(built, installed)
        assert installed.stat().st_ino == first  # nothing to do
        built.write_bytes(b"newer")
        native_build.replace_file(built, installed)
        assert loaded.read() == b"old"
    assert installed.read_bytes() == b"newer"
    assert sorted(tmp_path.iterdir()) == [built, installed]


def test_two_builds_do_not_run_in_one_folder_at_once(tmp_path: Path) -> None:
    code = (
        "import native_build, pathlib, sys\n"
        "with native_build.exclusive(pathlib.Path(sys.argv[1])):\n"
        "    print('building', flush=True)\n"
        "    sys.stdin.readline()\n"
    )

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "cmake")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    assert first.stdout is not None and first.stdout.readline() == "building\n"
    second = start()
    assert second.stderr is not None and "another build runs in this folder" in second.stderr.readline()
    assert first.communicate("done\n", timeout=60) == ("", "")
    assert second.communicate("done\n", timeout=60) == ("building\n", "")
