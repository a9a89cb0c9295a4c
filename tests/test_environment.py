"""The environment variables: one place reads them, at import, and refuses what is malformed by name."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.fake import in_process

from flash_ext import _C, environment

ROOT = Path(__file__).resolve().parent.parent
SWITCHES = {"FLASH_EXT_CHECK": "CHECK", "FLASH_EXT_POISON": "POISON", "FLASH_EXT_NO_DLPACK": "NO_DLPACK"}


def read(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, Any]:
    """The names of the module, read anew from these variables alone, and ``configured``, what `_C` was given."""
    configured: dict[str, Any] = {}
    monkeypatch.setattr(_C, "configure", configured.update)
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return {**runpy.run_path(environment.__file__), "configured": configured}


def test_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    names = read(monkeypatch, FLASH_EXT_PATH="", FLASH_EXT_TILE=" ", FLASH_EXT_CHECK="")
    assert (names["PATH"], names["EMULATE"], names["LIBRARY_DIR"]) == (None, None, "")
    assert not any(names[switch] for switch in SWITCHES.values())
    numbers = dict.fromkeys(("block_m", "block_n", "sm_count", "max_shared_memory"), 0)
    assert names["configured"] == {"library_dir": "", "emulated": False, "use_dlpack": True, **numbers}


@pytest.mark.parametrize("variable", SWITCHES)
def test_switches(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    for value in ("1", "true", "yes", "on", "TRUE", "Yes"):
        assert read(monkeypatch, **{variable: value})[SWITCHES[variable]] is True, value
    for value in ("0", "false", "no", "off", "NO", "Off"):
        assert read(monkeypatch, **{variable: value})[SWITCHES[variable]] is False, value


def test_numbers_and_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    configured = read(
        monkeypatch,
        FLASH_EXT_TILE="128x64",
        FLASH_EXT_SM_COUNT="20",
        FLASH_EXT_MAX_SHARED_MEMORY="2147483647",
        FLASH_EXT_LIBRARY_DIR="here",
        FLASH_EXT_NO_DLPACK="on",
        FLASH_EXT_EMULATE="sm90",
    )["configured"]
    assert (configured["block_m"], configured["block_n"], configured["sm_count"]) == (128, 64, 20)
    assert configured["max_shared_memory"] == 2**31 - 1
    assert configured["library_dir"] == str(tmp_path / "here")  # where it was when flash_ext was imported
    assert configured["emulated"] is True and configured["use_dlpack"] is False


@pytest.mark.parametrize(
    ("variable", "values", "allowed"),
    [
        *((name, ("2", "maybe", "-1", "1.0", "t"), "1, true, yes, on or 0, false, no, off") for name in SWITCHES),
        ("FLASH_EXT_PATH", ("sm75", "SM80", "gpu"), "one of sm100, sm90, sm80, cpu"),
        ("FLASH_EXT_EMULATE", ("cpu", "1"), "one of sm100, sm90, sm80"),
        (
            "FLASH_EXT_TILE",
            ("128x", "128", "x64", "0x64", "-1x64", "1e2x64", "128x64x32", "99999999999x1", "128x99999999999", "٣x1"),
            "two positive integers as in 128x64",
        ),
        *(
            (name, ("many", "0", "-3", "1.5", "2147483648", "99999999999", "1_0", "0x10"), "an integer from 1 to")
            for name in ("FLASH_EXT_SM_COUNT", "FLASH_EXT_MAX_SHARED_MEMORY")
        ),
    ],
)
def test_malformed_values(
    monkeypatch: pytest.MonkeyPatch, variable: str, values: tuple[str, ...], allowed: str
) -> None:
    for value in values:
        with pytest.raises(ValueError) as refused:
            read(monkeypatch, **{variable: value})
        message = str(refused.value)
        assert message.startswith(f"flash_ext: {variable} is {value!r}; expected {allowed}"), message


def test_a_path_beside_an_emulated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"flash_ext: FLASH_EXT_PATH is 'sm90'; expected sm80 \(which FLASH_EXT_EMUL"):
        read(monkeypatch, FLASH_EXT_EMULATE="sm80", FLASH_EXT_PATH="sm90")
    for path in ("sm80", "cpu"):
        assert read(monkeypatch, FLASH_EXT_EMULATE="sm80", FLASH_EXT_PATH=path)["PATH"] == path


@in_process(FLASH_EXT_EMULATE="sm80", FLASH_EXT_PATH="cpu")
def test_the_cpu_path_goes_past_the_emulator() -> None:
    import torch

    import flash_ext

    q = torch.randn(1, 3, 2, 64).bfloat16()
    assert flash_ext.explain(q, q, q).path == "cpu"
    assert not torch.equal(flash_ext.flash_attn_func(q, q, q), q)  # which the make-believe kernels would give


@in_process(FLASH_EXT_CHECK="no", FLASH_EXT_POISON="off", FLASH_EXT_NO_DLPACK="yes")
def test_what_the_switches_switch() -> None:
    import torch

    from flash_ext import _C, allocate, checks

    assert not checks.VALIDATE and not allocate.POISON
    assert not _C.tensor_info(torch.zeros(1))["dlpack"]


@pytest.mark.parametrize(("variable", "value"), [("FLASH_EXT_PATH", "sm75"), ("FLASH_EXT_TILE", "99999999999x1")])
def test_malformed_values_are_refused_at_import(variable: str, value: str) -> None:
    variables = {**os.environ, variable: value, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    result = subprocess.run([sys.executable, "-c", "import flash_ext"], env=variables, capture_output=True, text=True)
    assert result.returncode != 0
    assert f"ValueError: flash_ext: {variable} is '{value}'; expected" in result.stderr


def test_nothing_else_reads_the_environment() -> None:
    """But for the demo's folder, which is read where it is used, and the command line, which sets FLASH_EXT_PATH."""
    sources = [*ROOT.glob("flash_ext/**/*.py"), *ROOT.glob("csrc/**/*.[chu]*")]
    read = re.compile(r"getenv\(|environ(?:\.get)?\s*[\[(]\s*[\"']FLASH_EXT")
    readers = {file.name for file in sources if read.search(file.read_text(encoding="utf-8"))}
    assert readers == {"model_files.py", "__main__.py"}


def test_readme_names_every_variable() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(FLASH_EXT_\w+)`", readme))
    assert set(environment.VARIABLES) <= documented
    source = Path(environment.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r"_read\w*\(\"(FLASH_EXT_\w+)\"", source)) <= set(environment.VARIABLES)
    read = re.compile(r"(?:environ(?:ment)?(?:\.get)?\s*[\[(]|_read_switch\()\s*[\"'](FLASH_EXT_\w+)")
    used = {name for file in ROOT.glob("cmake/*.py") for name in read.findall(file.read_text(encoding="utf-8"))}
    assert "FLASH_EXT_PATHS" in used  # the pattern still finds them
    assert used <= documented
