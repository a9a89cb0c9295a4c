"""What a build uses: its options, the CUDA compiler, the CUTLASS headers.

Everything here needs the standard library alone: the build backend imports it before any requirement is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PATHS = ("sm80", "sm90", "sm100")
MINIMUM_CUDA = (13, 0)

# One version of every part: a bare nvidia-cuda-nvcc mixes versions, and then ptxas refuses what cicc wrote.
CUDA_REQUIREMENT = "cuda-toolkit[nvcc,crt,nvvm,cudart,cccl]==13.0.2"
# Taken with --no-deps: its Python requirements (cuda-python, scipy, ...) have nothing to do with the headers.
CUTLASS_REQUIREMENT = "nvidia-cutlass==4.2.0.0"
CUTLASS_SHA256 = "f9599ada45c7bcb6bf53f7d3f0a7d154183e53451c01bfa59eecd37dd4a693f6"
CUTLASS_PREFIX = "cutlass_library/source/include/"

MINIMUM_PYTHON = (3, 10)
MINIMUM_GLIBC = (2, 17)  # of the oldest distributions that PyPI's CPython wheels serve
# Run by an interpreter of FLASH_EXT_PYTHONS, whatever its age.
DESCRIBE_PYTHON = (
    "import json, sys, sysconfig as s; print(json.dumps(dict(version=list(sys.version_info[:2]), "
    "name=sys.implementation.name, free_threaded=bool(s.get_config_var('Py_GIL_DISABLED')), "
    "executable=sys.executable, tag=sys.implementation.cache_tag, suffix=s.get_config_var('EXT_SUFFIX'))))"
)

NO_NVCC = (
    "no CUDA compiler (nvcc {minimum} or newer) was found. Any one of these helps:\n"
    "  - set CUDA_HOME to a CUDA toolkit, or put its nvcc on PATH;\n"
    '  - pip install "{requirement}", or build with pip\'s build isolation, which does that by itself;\n'
    "  - set FLASH_EXT_PATHS=none to build without kernels (the cpu path alone)."
)


class BuildError(RuntimeError):
    """A build cannot go on; the message says why and what to do."""


@dataclass(frozen=True)
class Python:
    """A CPython that flash_ext._C is built for.

    Attributes
    ----------
    executable : str
        Its interpreter.
    version : (int, int)
        Major and minor.
    tag : str
        For example ``"cpython-312"``.
    suffix : str
        What the file name of an extension module ends with.
    """

    executable: str
    version: tuple[int, int]
    tag: str
    suffix: str


@dataclass(frozen=True)
class Options:
    """What the environment asks of a build.

    Attributes
    ----------
    paths : tuple of str
        The paths whose libraries are built, in the order of `PATHS`; may be empty.
    jobs : int
        Compilers that run at once.
    lineinfo : bool
        Whether kernels carry source lines for profilers; triples the size of the machine code.
    glibc : tuple of int
        The oldest glibc that what is built runs with, e.g. ``(2, 28)``; empty: this machine's.
    """

    paths: tuple[str, ...]
    jobs: int
    lineinfo: bool
    glibc: tuple[int, ...] = ()


@dataclass(frozen=True)
class Toolchain:
    """The tools of a build of kernels.

    Attributes
    ----------
    nvcc : str
        The CUDA compiler.
    cuda_version : str
        For example ``"13.0.88"``.
    cuda_include, cudart : str
        The toolkit's header folder and its libcudart_static.a.
    host_compiler : str
        What nvcc gets as ``-ccbin``; empty: what it finds on PATH.
    host_version : str
        First line of the host compiler's ``--version``.
    ccache : str
        The compiler cache; empty: none.
    cutlass_include : str
        Folder with ``cute/`` and ``cutlass/``; empty when no path of this build needs it.
    cutlass_version : str
        What tells one CUTLASS from another; empty without.
    """

    nvcc: str
    cuda_version: str
    cuda_include: str
    cudart: str
    host_compiler: str
    host_version: str
    ccache: str
    cutlass_include: str
    cutlass_version: str

    @property
    def fingerprint(self) -> str:
        """What objects depend on: a change of this recompiles every unit, a change of folders does not."""
        return f"nvcc {self.cuda_version}\n{self.host_version}\ncutlass {self.cutlass_version or 'none'}\n"

    def to_json(self) -> str:
        """All fields, for the processes that compile the units."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_options(environment: Mapping[str, str] = os.environ) -> Options:
    """Read FLASH_EXT_PATHS, FLASH_EXT_JOBS, FLASH_EXT_LINEINFO and FLASH_EXT_GLIBC.

    Raises
    ------
    BuildError
        A value is none of the allowed ones; or ``native`` without a GPU that a path serves.
    """
    return Options(
        paths=_read_paths(environment.get("FLASH_EXT_PATHS", "").strip()),
        jobs=_read_jobs(environment.get("FLASH_EXT_JOBS", "").strip()),
        lineinfo=_read_switch("FLASH_EXT_LINEINFO", environment.get("FLASH_EXT_LINEINFO", "").strip()),
        glibc=_read_glibc(environment.get("FLASH_EXT_GLIBC", "").strip()),
    )


def read_pythons(environment: Mapping[str, str] = os.environ) -> tuple[Python, ...]:
    """The Pythons of FLASH_EXT_PYTHONS, oldest first; empty where it is not set: then it is the running one alone.

    Raises
    ------
    BuildError
        One is not there, too old, of another kind, or named twice.
    """
    pythons: dict[tuple[int, int], Python] = {}
    for name in filter(None, (part.strip() for part in environment.get("FLASH_EXT_PYTHONS", "").split(","))):
        python = _find_python(name, environment)
        if python.version in pythons:
            raise BuildError(f"FLASH_EXT_PYTHONS names Python {_dotted(python.version)} twice")
        pythons[python.version] = python
    return tuple(pythons[version] for version in sorted(pythons))


def _find_python(name: str, environment: Mapping[str, str]) -> Python:
    command = f"python{name}" if re.fullmatch(r"3\.\d+", name) else name
    executable = shutil.which(command, path=environment.get("PATH"))
    try:
        if executable is None:
            raise OSError("it is not there")
        result = subprocess.run([executable, "-c", DESCRIBE_PYTHON], capture_output=True, text=True, check=True)
        found = json.loads(result.stdout)
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError) as error:
        raise BuildError(
            f"FLASH_EXT_PYTHONS: {command} does not run ({error}); allowed are versions whose interpreter is on PATH "
            "(3.10,3.11) and interpreters (/usr/bin/python3.12)"
        ) from None
    version = (found["version"][0], found["version"][1])
    if found["name"] != "cpython" or found["free_threaded"] or version < MINIMUM_PYTHON:
        kind = f"{found['name']} {_dotted(version)}{' without the GIL' if found['free_threaded'] else ''}"
        raise BuildError(
            f"FLASH_EXT_PYTHONS: {command} is {kind}; needed is CPython {_dotted(MINIMUM_PYTHON)} or newer"
        )
    return Python(found["executable"], version, found["tag"], found["suffix"])


def running_python() -> Python:
    """The Python that runs this."""
    tag = sys.implementation.cache_tag or sys.implementation.name
    return Python(sys.executable, sys.version_info[:2], tag, sysconfig.get_config_var("EXT_SUFFIX"))


def requires_python(pythons: tuple[Python, ...]) -> str:
    """``Requires-Python`` of a distribution with modules for these Pythons; for none, that of the sources."""
    if not pythons:
        return f">={_dotted(MINIMUM_PYTHON)}"
    minors = [python.version[1] for python in pythons]
    missing = [f"!=3.{minor}.*" for minor in range(minors[0], minors[-1]) if minor not in minors]
    return ",".join([f">=3.{minors[0]}", f"<3.{minors[-1] + 1}", *missing])


def _read_paths(value: str) -> tuple[str, ...]:
    if value == "none":
        return ()
    if value in ("", "native"):
        native = native_paths()
        if value == "native" and not native:
            raise BuildError(
                "FLASH_EXT_PATHS=native, but no GPU of compute capability 8.0 or newer is visible here; "
                "name the paths (sm80,sm90,sm100) or take none"
            )
        return native or PATHS
    names = [name.strip() for name in value.split(",")]
    for name in names:
        if name not in PATHS:
            raise BuildError(
                f"FLASH_EXT_PATHS={value!r}: {name!r} is unknown; allowed are native, none, or a comma-separated list "
                f"of {', '.join(PATHS)}"
            )
    return tuple(path for path in PATHS if path in names)


def _read_jobs(value: str) -> int:
    if not value:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not re.fullmatch(r"[1-9][0-9]{0,3}", value):
        raise BuildError(f"FLASH_EXT_JOBS={value!r}: allowed are integers from 1 to 9999")
    return int(value)


def _read_glibc(value: str) -> tuple[int, ...]:
    """Empty where the machine's own is asked for, or is as old."""
    if not value:
        return ()
    if not re.fullmatch(r"2\.[0-9]{1,3}", value) or _numbers(value) < MINIMUM_GLIBC:
        raise BuildError(f"FLASH_EXT_GLIBC={value!r}: allowed are versions from {_dotted(MINIMUM_GLIBC)}, like 2.28")
    name, _, own = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")  # "glibc 2.36"
    if name != "glibc":
        raise BuildError(f"FLASH_EXT_GLIBC={value}: this system's C library is not glibc")
    return _numbers(value) if _numbers(own) > _numbers(value) else ()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _read_switch(name: str, value: str) -> bool:
    if value not in ("", "0", "1"):
        raise BuildError(f"{name}={value!r}: allowed are 0 and 1")
    return value == "1"


def native_paths() -> tuple[str, ...]:
    """The paths this machine's visible GPUs use, the sm80 fallback included; empty without such a GPU."""
    capabilities = {capability for capability in visible_gpus() if capability >= (8, 0)}
    if not capabilities:
        return ()
    own = {"sm90": {(9, 0)}, "sm100": {(10, 0), (10, 3)}}
    return ("sm80", *(path for path, served in own.items() if served & capabilities))


def visible_gpus() -> list[tuple[int, int]]:
    """Compute capabilities of the visible GPUs, from the driver; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    capabilities = []
    for ordinal in range(count.value):
        major, minor = ctypes.c_int(0), ctypes.c_int(0)
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR; the CUdevice of an ordinal is the ordinal.
        if driver.cuDeviceGetAttribute(ctypes.byref(major), 75, ordinal) == 0:
            if driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, ordinal) == 0:
                capabilities.append((major.value, minor.value))
    return capabilities


def find_nvcc(toolkit_dir: Path | None = None, environment: Mapping[str, str] = os.environ) -> str | None:
    """The first nvcc of at least `MINIMUM_CUDA`: in CUDA_HOME, on PATH, from PyPI in `toolkit_dir` or on sys.path.

    Parameters
    ----------
    toolkit_dir : Path, optional
        Where `install_cuda` put the toolkit.
    environment : mapping of str to str
        Where CUDA_HOME and PATH are read.

    Returns
    -------
    str or None
        Its path. An older one is passed over with a note on stderr.
    """
    candidates: list[tuple[str, str | None]] = []
    if environment.get("CUDA_HOME"):
        candidates.append(("CUDA_HOME", str(Path(environment["CUDA_HOME"]) / "bin" / "nvcc")))
    candidates.append(("PATH", shutil.which("nvcc", path=environment.get("PATH"))))
    roots = [] if toolkit_dir is None else [toolkit_dir / "nvidia"]
    spec = importlib.util.find_spec("nvidia")
    if spec is not None:
        roots += [Path(location) for location in spec.submodule_search_locations or ()]
    candidates += [("PyPI", str(root / "cu13" / "bin" / "nvcc")) for root in roots]
    for origin, nvcc in candidates:
        if nvcc is None or not os.access(nvcc, os.X_OK):
            if origin == "CUDA_HOME":
                note(f"CUDA_HOME={environment['CUDA_HOME']} has no bin/nvcc and is passed over")
            continue
        version = nvcc_version(nvcc)
        if version is not None and tuple(int(part) for part in version.split(".")[:2]) >= MINIMUM_CUDA:
            return nvcc
        note(
            f"{nvcc} (from {origin}, version {version or 'unknown'}) is older than {_dotted(MINIMUM_CUDA)}: passed over"
        )
    return None


def nvcc_version(nvcc: str) -> str | None:
    """The version an nvcc prints, e.g. ``"13.0.88"``; None if it does not run."""
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return match.group(1) if match else None


def toolkit_root(nvcc: str) -> Path:
    """The toolkit an nvcc belongs to, which it says itself (it may be a link or a script on PATH)."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.cu"
        empty.touch()
        text = subprocess.run([nvcc, "--dryrun", "-c", str(empty)], cwd=folder, capture_output=True, text=True).stderr
    match = re.search(r"^#\$ _HERE_=(.+)$", text, re.MULTILINE)
    if match is None:
        raise BuildError(f"{nvcc} --dryrun does not say where its toolkit lies")
    return Path(match.group(1).strip()).resolve().parent


def find_toolchain(needs_cutlass: bool, cache_dir: Path, environment: Mapping[str, str] = os.environ) -> Toolchain:
    """Find everything that kernels are compiled with.

    Parameters
    ----------
    needs_cutlass : bool
        Whether a path of this build includes CUTLASS headers.
    cache_dir : Path
        Where downloaded headers and toolkits lie (``build/toolchain``).
    environment : mapping of str to str
        Where CUDA_HOME, PATH, CUDAHOSTCXX and CUTLASS_PATH are read.

    Raises
    ------
    BuildError
        Something is missing; the message says how to get it.
    """
    nvcc = find_nvcc(cache_dir / "cuda", environment)
    if nvcc is None:
        raise BuildError(NO_NVCC.format(minimum=_dotted(MINIMUM_CUDA), requirement=CUDA_REQUIREMENT))
    root = toolkit_root(nvcc)
    target = root / "targets" / f"{platform.machine()}-linux"
    cudart = _first_with([root / "lib64", root / "lib", target / "lib"], "libcudart_static.a")
    include = _first_with([root / "include", target / "include"], "cuda_runtime_api.h")
    if cudart is None or include is None:
        missing = "libcudart_static.a" if cudart is None else "cuda_runtime_api.h"
        raise BuildError(f"the CUDA toolkit at {root} has no {missing}; install its cudart development package")
    host_compiler = environment.get("CUDAHOSTCXX", "")
    cutlass_include, cutlass_version = find_cutlass(cache_dir, environment) if needs_cutlass else ("", "")
    return Toolchain(
        # The toolkit's own binary, not a script on PATH that calls it.
        nvcc=str(root / "bin" / "nvcc") if (root / "bin" / "nvcc").is_file() else nvcc,
        cuda_version=nvcc_version(nvcc) or "",
        cuda_include=str(include),
        cudart=str(cudart / "libcudart_static.a"),
        host_compiler=host_compiler,
        host_version=_first_line([host_compiler or "g++", "--version"]),
        ccache=shutil.which("ccache", path=environment.get("PATH")) or "",
        cutlass_include=cutlass_include,
        cutlass_version=cutlass_version,
    )


def find_cutlass(cache_dir: Path, environment: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """CUTLASS's header folder and its version: CUTLASS_PATH, else the pinned wheel, unpacked under `cache_dir`."""
    given = environment.get("CUTLASS_PATH", "")
    if given:
        for include in (Path(given) / "include", Path(given)):
            header = include / "cutlass" / "version.h"
            if header.is_file():
                digest = hashlib.sha256(header.read_bytes()).hexdigest()[:12]
                return str(include.resolve()), f"{_cutlass_version(header)} (version.h {digest})"
        raise BuildError(f"CUTLASS_PATH={given}: no include/cutlass/version.h there; it names a CUTLASS source folder")
    name = CUTLASS_REQUIREMENT.replace("==", "-")
    include = cache_dir / name / "include"
    if not (include / "cutlass" / "version.h").is_file():
        download_cutlass(include)
    return str(include.resolve()), CUTLASS_REQUIREMENT.partition("==")[2]


def download_cutlass(include: Path) -> None:
    """Download the pinned CUTLASS wheel, check its hash and unpack its headers to `include`."""
    print(f"flash_ext: taking the CUTLASS headers from {CUTLASS_REQUIREMENT}", flush=True)
    include.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=include.parent) as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            folder,
            CUTLASS_REQUIREMENT,
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise BuildError(
                f"{CUTLASS_REQUIREMENT} could not be downloaded; without a network set CUTLASS_PATH to a CUTLASS "
                "source folder, or build without the paths that need it (FLASH_EXT_PATHS=sm80 or none).\n"
                + result.stderr.strip()
            )
        unpack_cutlass(wheels[0], include)


def unpack_cutlass(wheel: Path, include: Path, sha256: str = CUTLASS_SHA256) -> None:
    """Check a CUTLASS wheel's hash and unpack its headers, so that `include` exists only when it is complete."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != sha256:
        raise BuildError(f"{wheel.name} has sha256 {digest}, not the pinned {sha256}; refusing to build from it")
    unpacked = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith(CUTLASS_PREFIX)])
    (unpacked / CUTLASS_PREFIX).rename(include)


def install_cuda(cache_dir: Path) -> None:
    """Install the pinned CUDA toolkit from PyPI under `cache_dir`, where it clashes with no package of torch's."""
    print(f"flash_ext: no nvcc {_dotted(MINIMUM_CUDA)} or newer here; taking {CUDA_REQUIREMENT}", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    command += ["--target", str(cache_dir / "cuda"), CUDA_REQUIREMENT]
    if subprocess.run(command).returncode != 0:
        raise BuildError(NO_NVCC.format(minimum=_dotted(MINIMUM_CUDA), requirement=CUDA_REQUIREMENT))


def build_requirements(paths: tuple[str, ...], environment: Mapping[str, str] = os.environ) -> list[str]:
    """What an isolated build of `paths` needs beyond pyproject.toml: the toolkit where there is none, and pip."""
    requirements: list[str] = []
    if paths and find_nvcc(environment=environment) is None:
        requirements.append(CUDA_REQUIREMENT)
    if paths:  # isolated environments lack pip
        requirements.append("pip")
    return requirements


def note(message: str) -> None:
    """One line on stderr."""
    print(f"flash_ext: {message}", file=sys.stderr, flush=True)


def _cutlass_version(header: Path) -> str:
    numbers = re.findall(r"#define\s+CUTLASS_(?:MAJOR|MINOR|PATCH)\s+(\d+)", header.read_text(encoding="utf-8"))
    return ".".join(numbers)


def _first_with(folders: list[Path], name: str) -> Path | None:
    return next((folder for folder in folders if (folder / name).is_file()), None)


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise BuildError(
            f"the host compiler {command[0]!r} does not run; install g++, or set CUDAHOSTCXX to one that nvcc accepts"
        ) from None


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def main() -> int:
    """Put the CUDA toolkit of PyPI under build/toolchain if the build that the environment asks for needs one."""
    try:
        if read_options().paths:
            cache_dir = Path(__file__).resolve().parent.parent / "build" / "toolchain"
            if find_nvcc(cache_dir / "cuda") is None:
                install_cuda(cache_dir)
    except BuildError as error:
        print(f"flash_ext: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
