"""Selects the paths, gives each a process of its own, and hands the tests their path and their random numbers.

``pytest`` runs the tests that ask for no path in the user's environment, then starts one pytest per path that this
machine can run; the last line printed and the exit status count all of them. ``pytest --path cpu`` runs one path in
this process. See README.md in this folder.
"""

from __future__ import annotations

import gc
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path as FilePath
from typing import Any

import hypothesis
import pytest
import torch
from helpers import paths
from helpers.allocations import GuardedAllocations
from helpers.cases import Case
from helpers.paths import INDEPENDENT, NAMES, Path, emulated_library_dir

import toolchain

__all__ = ["emulated_library_dir"]

_EXAMPLES = {"ci": 25, "dev": 50, "thorough": 1000}
# What the child processes leave for their parent, in the order in which pytest's summary names them.
_OUTCOMES = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "errors")

for _name, _examples in _EXAMPLES.items():
    hypothesis.settings.register_profile(
        _name,
        max_examples=_examples,
        deadline=None,
        derandomize=False,
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.data_too_large,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _put_nvcc_on_path() -> None:
    """The emulator's tests call nvcc by its name; the build may have found it elsewhere, or taken PyPI's."""
    if shutil.which("nvcc") is None:
        nvcc = toolchain.find_nvcc(FilePath(__file__).resolve().parent.parent / "build" / "toolchain" / "cuda")
        if nvcc is not None:
            os.environ["PATH"] = os.pathsep.join(filter(None, (os.environ.get("PATH"), str(FilePath(nvcc).parent))))


_put_nvcc_on_path()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("flash_ext")
    group.addoption(
        "--path",
        action="append",
        default=[],
        metavar="NAME[,NAME]",
        help=f"paths to test: {', '.join(NAMES)}, or '{INDEPENDENT}' for the tests that need no path; "
        f"default: '{INDEPENDENT}' and every path that this machine can run",
    )
    group.addoption(
        "--shared-memory",
        type=int,
        default=None,
        metavar="BYTES",
        help="set FLASH_EXT_MAX_SHARED_MEMORY, and run only the tests that then run on other tiles than without it "
        "(101376: GPUs of compute capability 8.6, 8.9 and 12.0; 166912: 8.0 and 8.7)",
    )
    group.addoption("--seed", type=int, default=None, help="seed of all random inputs; default: a new one")
    group.addoption("--path-here", default=None, help="(internal) the one path that this process runs")
    group.addoption("--path-report", default=None, help="(internal) where this process leaves its counts")


# ---------------------------------------------------------------------------------------------------------------------
# Processes.


def _selected(config: pytest.Config) -> list[str]:
    """The paths this run asks for, the one of this process first."""
    names = [name.strip() for entry in config.option.path for name in entry.split(",") if name.strip()]
    names = names or list(filter(None, map(_path_of_node_id, config.invocation_params.args)))
    if not names:
        return [INDEPENDENT, *paths.available()]
    for name in names:
        if name not in (INDEPENDENT, *NAMES):
            raise pytest.UsageError(f"--path {name}: not one of {', '.join((INDEPENDENT, *NAMES))}")
        reason = None if name == INDEPENDENT else paths.unavailable_reason(name)
        if reason:
            raise pytest.UsageError(f"--path {name}: {reason}")
    return list(dict.fromkeys(names))


def _path_of_node_id(argument: object) -> str | None:
    """``cpu`` of ``tests/test_contract_scores.py::test_softcap[cpu-...]``."""
    names = "|".join(map(re.escape, sorted(NAMES, key=len, reverse=True)))
    match = re.search(rf"::\w+\[({names})[-\]]", str(argument))
    return match.group(1) if match else None


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Settle what this process runs before flash_ext is imported; run the other paths after it."""
    option = config.option
    if option.shared_memory is not None:
        os.environ["FLASH_EXT_MAX_SHARED_MEMORY"] = str(option.shared_memory)
    given = getattr(config, "workerinput", None)
    if given is not None:  # a process of pytest-xdist, which has the environment of its controller
        option.path_here, option.seed = given["flash_ext_path"], given["flash_ext_seed"]
        option.path_report = given["flash_ext_report"]  # its folder: the worker itself reports to its controller
        return (yield)
    if option.seed is None:
        option.seed = random.SystemRandom().randrange(2**32)
    if option.path_here is not None:
        return (yield)
    if option.collectonly or option.help or option.version:
        option.path_here = _selected(config)[0]
        return (yield)

    here, *others = _selected(config)
    option.path_here = here
    _set_environment(here)
    with tempfile.TemporaryDirectory(prefix="flash_ext_tests") as folder:
        option.path_report = os.path.join(folder, here)
        start = time.monotonic()
        statuses = {here: int((yield))}
        if statuses[here] == pytest.ExitCode.INTERRUPTED or not others:
            return statuses[here]
        reports = {here: _read_report(option.path_report)}
        for name in others:
            report = os.path.join(folder, name)
            statuses[name] = _run_child(config, name, report)
            reports[name] = _read_report(report)
            if statuses[name] == pytest.ExitCode.INTERRUPTED:
                break
        return _summarise(config, statuses, reports, time.monotonic() - start)


def _set_environment(name: str) -> None:
    for variable in ("FLASH_EXT_PATH", "FLASH_EXT_EMULATE"):
        if name != INDEPENDENT:
            os.environ.pop(variable, None)
    os.environ.update(paths.environment(name))


def _run_child(config: pytest.Config, name: str, report: str) -> int:
    arguments = []
    given = iter(config.invocation_params.args)
    for argument in map(str, given):
        if argument in ("--path", "--seed"):
            next(given, None)
        elif not argument.startswith(("--path=", "--seed=")):
            arguments.append(argument)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    for variable in ("FLASH_EXT_PATH", "FLASH_EXT_EMULATE"):
        environment.pop(variable, None)
    environment.update(paths.environment(name))
    command = [sys.executable, "-m", "pytest", *arguments, f"--seed={config.option.seed}"]
    command += [f"--path-here={name}", f"--path-report={report}"]
    if Path(name).kind != "gpu":
        command += _parallel(config)
    sys.stdout.flush()
    return subprocess.run(command, env=environment, cwd=config.invocation_params.dir, check=False).returncode


def _parallel(config: pytest.Config) -> list[str]:
    """Options of pytest-xdist for a child that needs no GPU: a worker per core, unless this run asks for something
    that wants one process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    option = config.option
    alone = option.usepdb or option.capture == "no" or option.collectonly or getattr(option, "numprocesses", None)
    if cores == 1 or alone or not config.pluginmanager.hasplugin("xdist"):
        return []
    return [f"--numprocesses={min(cores, 8)}", "--dist=worksteal"]


def _read_report(file: str) -> Counter[str]:
    try:
        return Counter(json.loads(FilePath(file).read_text()))
    except (FileNotFoundError, json.JSONDecodeError):
        return Counter()


def _summarise(
    config: pytest.Config, statuses: dict[str, int], reports: dict[str, Counter[str]], seconds: float
) -> int:
    """Print a line per path and, last, one like pytest's own; the exit status of the whole run."""
    nothing = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    lines = []
    for name, status in statuses.items():
        counts = ", ".join(f"{reports[name][key]} {key}" for key in _OUTCOMES if reports[name][key]) or "nothing to run"
        bad = f"  (exit status {status})" if status not in (0, 1, nothing) else ""
        lines.append(f"{'no path' if name == INDEPENDENT else name:>15}: {counts}{bad}")
    print("\n" + "\n".join(lines))
    total: Counter[str] = sum(reports.values(), Counter())
    text = ", ".join(f"{total[key]} {key}" for key in _OUTCOMES if total[key]) or "no tests ran"
    print(f"===== {text} in {seconds:.2f}s over {len(statuses)} processes =====", flush=True)
    bad_statuses = [status for status in statuses.values() if status not in (0, nothing)]
    if bad_statuses:
        return max(bad_statuses)
    return 0 if 0 in statuses.values() else nothing


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist: its controller reports
        output["flash_ext_reasons"] = dict(session.config.stash.get(_REASONS, None) or {})
        return
    file = session.config.option.path_report
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if file is None or reporter is None:
        return
    stats = {"error": "errors"}
    counts = {
        stats.get(key, key): sum(getattr(report, "count_towards_summary", True) for report in reports)
        for key, reports in reporter.stats.items()
        if stats.get(key, key) in _OUTCOMES
    }
    counts["deselected"] = max(
        counts.get("deselected", 0), sum((session.config.stash.get(_REASONS, None) or {}).values())
    )
    FilePath(file).write_text(json.dumps(counts))


# ---------------------------------------------------------------------------------------------------------------------
# Selection.


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "needs(direction, *features, head_dims=(64, 64)): kernels that a test of a path needs beside those of its case",
        "large(*kinds): over 8 GB or minutes on paths of these kinds (cpu, emulated, gpu; all without an argument); "
        "real GPUs run it, others on demand (-m large)",
        "gpu: needs a real GPU: streams, graphs, device memory",
        "sanitizer: small enough for compute-sanitizer",
    ):
        config.addinivalue_line("markers", line)
    torch.set_num_threads(1)  # the shapes are small, and several processes may share the cores
    gc.set_threshold(100_000, 20, 100)  # collecting thousands of tests makes no garbage, but a garbage collector busy
    _keep_bytecode(config)


def _keep_bytecode(config: pytest.Config) -> None:
    """Where PYTHONDONTWRITEBYTECODE is set, rewriting the assertions of all tests takes each process seconds: let those
    of one run share a cache in its own temporary folder."""
    report = config.option.path_report
    if sys.dont_write_bytecode and sys.pycache_prefix is None and report is not None:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = str(FilePath(report).parent / "pycache")


def pytest_collection_finish() -> None:
    """What exists now stays for good: full collections of garbage need not walk through it after every few tests."""
    gc.collect()
    gc.freeze()


def pytest_report_header(config: pytest.Config) -> list[str]:
    option = config.option
    if option.path_here is None:
        return []
    variables = " ".join(f"{key}={value}" for key, value in paths.environment(option.path_here).items())
    lines = [f"flash_ext path: {option.path_here} ({variables}); --seed={option.seed}"]
    if option.path_report and not option.path and option.path_here == INDEPENDENT:
        lines.append("flash_ext paths to come, each in its own process: " + ", ".join(_selected(config)[1:]))
        missing = [f"{name} ({paths.unavailable_reason(name)})" for name in NAMES if paths.unavailable_reason(name)]
        lines.append("flash_ext paths not run here: " + "; ".join(missing))
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "path" in metafunc.fixturenames:
        here = metafunc.config.option.path_here
        metafunc.parametrize("path", [Path(here)], ids=[here], indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = config.option.path_here
    path = None if here == INDEPENDENT else Path(here)
    wants_large = "large" in (config.option.markexpr or "").replace("not large", "")
    reasons: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        needs_path = "path" in getattr(item, "fixturenames", ())
        if needs_path != (path is not None):
            continue  # another process runs it
        reason = _unselected_reason(item, path, wants_large, config.option.shared_memory) if path else None
        if path is None and config.option.shared_memory is not None:
            reason = _SAME_TILE
        if reason is None:
            kept.append(item)
        else:
            reasons[reason] += 1
            dropped.append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    items[:] = kept
    config.stash[_REASONS] = reasons


_SAME_TILE = "run on the same tile with as much shared memory as --shared-memory leaves"
_REASONS = pytest.StashKey[Counter[str]]()


def _unselected_reason(item: pytest.Item, path: Path, wants_large: bool, shared_memory: int | None) -> str | None:
    """Why a test of the contract is not for this path, or None."""
    if item.get_closest_marker("gpu") and path.kind != "gpu":
        return "need a real GPU"
    for marker in item.iter_markers("large"):
        if path.kind != "gpu" and not wants_large and (not marker.args or path.kind in marker.args):
            return "are large (-m large)"
    params = getattr(getattr(item, "callspec", None), "params", {})
    case = params.get("case")
    directions = {params.get("direction", "forward")}
    features: set[str] = set()
    head_dims = (64, 64)
    dtype = torch.bfloat16
    for marker in item.iter_markers("needs"):
        directions.update(name for name in marker.args if name in ("forward", "backward"))
        features.update(name for name in marker.args if name not in ("forward", "backward"))
        head_dims = marker.kwargs.get("head_dims", head_dims)
    if isinstance(case, Case):
        features |= case.features
        head_dims, dtype = case.head_dims, case.dtype
    if path.capability:
        if not isinstance(case, Case) or not any(
            path.takes_another_tile(direction, dtype, head_dims, features) for direction in directions
        ):
            return "take the same kernels as on the library's own GPU"
    for direction in sorted(directions, reverse=True):  # forward first: nothing runs without it
        if not path.supports(direction, dtype, head_dims, features):
            if not path.supports(direction, dtype, (8, 8)):
                return f"need {direction} kernels, which are not built"
            if not path.supports(direction, dtype, head_dims):
                return f"need a {direction} kernel for head dims {head_dims[0]}, {head_dims[1]}, which is not built"
            missing = [name for name in sorted(features) if not path.supports(direction, dtype, head_dims, {name})]
            return f"need a {direction} kernel with {' and '.join(missing or sorted(features))}, which is not built"
    # A test of hypothesis draws its cases later.
    if shared_memory is not None and not getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
        if not any(path.changes_tile(x, dtype, head_dims, features, shared_memory) for x in directions):
            return _SAME_TILE
    return None


def _reason_lines(config: pytest.Config) -> list[str]:
    reasons = config.stash.get(_REASONS, Counter[str]())
    return [f"flash_ext: {count} tests not selected, they {reason}" for reason, count in reasons.most_common()]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    return _reason_lines(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["flash_ext_path"] = node.config.option.path_here
    node.workerinput["flash_ext_seed"] = node.config.option.seed
    node.workerinput["flash_ext_report"] = node.config.option.path_report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Under pytest-xdist the workers select; each selects the same, so the last one's reasons are the run's."""
    node.config.stash[_REASONS] = Counter(getattr(node, "workeroutput", {}).get("flash_ext_reasons", {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):
        for line in _reason_lines(config):
            terminalreporter.write_line(line)


# ---------------------------------------------------------------------------------------------------------------------
# Fixtures.


@pytest.fixture
def overlapping_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """For cu_seqlens that are not ascending: sequences then share rows, and that two CTAs write one row is no fault of
    the kernel. The emulator's checker would report the race, and the schedules would give several results."""
    monkeypatch.setenv("FLASH_EXT_EMULATOR_CHECK", "0")
    monkeypatch.setenv("FLASH_EXT_EMULATOR_SCHEDULE", "lazy")


@pytest.fixture(scope="session")
def path(request: pytest.FixtureRequest) -> Path:
    """The path under test; a test that takes it is run once for each path."""
    import flash_ext  # noqa: F401  (registers torch.ops.flash_ext)

    assert isinstance(request.param, Path)
    return request.param


def _seed(config: pytest.Config, item: pytest.Item) -> int:
    """The same for a test on every path, so that paths see the same numbers."""
    callspec = getattr(item, "callspec", None)
    name = (
        item.nodeid.replace(callspec.id, callspec.id.removeprefix(config.option.path_here)) if callspec else item.nodeid
    )
    return (int(config.option.seed) << 32) ^ zlib.crc32(name.encode())


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Random numbers that are new in every run and come back with ``--seed``."""
    return torch.Generator().manual_seed(_seed(request.config, request.node))


@pytest.fixture
def guarded_outputs(monkeypatch: pytest.MonkeyPatch, rng: torch.Generator) -> Iterator[GuardedAllocations]:
    """Outputs and workspaces are allocated inside larger buffers; ``check_surroundings`` says whether those changed."""
    allocations = GuardedAllocations(monkeypatch, rng)
    yield allocations
    allocations.restore()


_GIVEN_SEED = os.environ.get("FLASH_EXT_EMULATOR_SEED")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The schedules of the emulator are as new in every run as the inputs are, and come back with ``--seed``."""
    if "emulated" in item.config.option.path_here and _GIVEN_SEED is None:
        os.environ["FLASH_EXT_EMULATOR_SEED"] = str(_seed(item.config, item) % (1 << 31))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and "rng" in getattr(item, "fixturenames", ()):
        here = item.config.option.path_here
        report.sections.append(
            ("flash_ext", f"same inputs again: pytest --path={here} --seed={item.config.option.seed} '{item.nodeid}'")
        )
    return report


@pytest.fixture(autouse=True)
def _clean_torch_state() -> Iterator[None]:
    """Tests that ask torch for deterministic algorithms leave it as they found it."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != before:
        torch.use_deterministic_algorithms(before)
