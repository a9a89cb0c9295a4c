"""The benchmark harness: rows, turns, statistics, recordings. Nothing here depends on how fast a machine is."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import flash_ext
from flash_ext.bench import cli, results
from flash_ext.bench.providers import Provider, make_inputs, providers_for, reference_for
from flash_ext.bench.report import print_comparison, print_recording
from flash_ext.bench.results import OURS, Measurement, Recording, judge, summarise
from flash_ext.bench.rows import load_rows, log_uniform_lengths, select_rows
from flash_ext.bench.runner import measure
from flash_ext.bench.timing import Timer, order_of_turns, take_turns

CPU = torch.device("cpu")
FAST = Timer("cpu", warmup_ms=0, rep_ms=0)


def measurement(
    ours: list[float], theirs: list[float], *, row: str = "a", floor: float | None = 1.0, direction: str = "forward"
) -> Measurement:
    """One TFLOP per call, so that a time of 1 s is 1 TFLOP/s."""
    seconds = {name: times for name, times in ((OURS, ours), ("cudnn", theirs)) if times}
    return Measurement(row, "training", direction, 1e12, "cudnn", floor, None, seconds)


def recording(*measurements: Measurement) -> Recording:
    return Recording({"gpus": [], "cpu": "a CPU"}, {"path": "cpu"}, list(measurements), "2026-01-01T00:00:00+00:00")


# ---------------------------------------------------------------------------------------------------------------------
# Rows.


def test_row_names_are_unique() -> None:
    names = [row.name for row in load_rows()]
    assert len(set(names)) == len(names)


def test_training_rows_have_both_floors() -> None:
    training = [row for row in load_rows() if row.group == "training"]
    assert len(training) == 22
    for row in training:
        assert set(row.floors) == {"forward", "backward"}
        assert all(1.0 <= floor <= 1.5 for floor in row.floors.values())


def test_flop_counts_two_products_and_half_of_them_when_causal() -> None:
    rows = {row.name: row for row in load_rows()}
    full, causal = rows["b4 s4096 h16 d128 full"], rows["b4 s4096 h16 d128 causal"]
    assert full.flop("forward") == 4 * 4 * 16 * 4096**2 * 128
    assert causal.flop("forward") == full.flop("forward") / 2
    assert full.flop("backward") == 2.5 * full.flop("forward")


def test_flop_of_packed_rows_sums_the_squares() -> None:
    (row,) = (row for row in load_rows() if row.packed)
    assert row.flop("forward") == 2 * 128 * 16 * sum(length**2 for length in row.lengths)


def test_varlen_lengths_are_log_uniform_and_fixed() -> None:
    (row,) = (row for row in load_rows() if row.packed)
    assert row.lengths == log_uniform_lengths(64, 64, 8192, seed=0)
    assert len(row.lengths) == 64
    assert min(row.lengths) >= 64 and max(row.lengths) <= 8192
    # These depend on Python's generator alone, which promises the same numbers for a seed in every version.
    assert row.lengths[:4] == (3851, 2531, 493, 225)
    logs = [math.log2(length / 64) / 7 for length in log_uniform_lengths(4000, 64, 8192, seed=1)]
    assert sum(logs) / len(logs) == pytest.approx(0.5, abs=0.02)


def test_share_of_names_a_row() -> None:
    names = {row.name for row in load_rows()}
    shares = [row.share_of for row in load_rows() if row.share_of is not None]
    assert shares and all(share[0] in names for share in shares)


def test_selecting_rows() -> None:
    assert {row.group for row in select_rows("cuda")} == {"training", "varlen"}
    assert {row.group for row in select_rows("cpu")} == {"cpu"}
    assert [row.name for row in select_rows("cuda", "^b4 s4096 h16 d128 causal$")] == ["b4 s4096 h16 d128 causal"]
    assert 0 < len(select_rows("cuda", quick=True)) < len(select_rows("cuda"))
    with pytest.raises(ValueError, match=r"flash_ext: --rows='d999'.*b4 s4096"):
        select_rows("cuda", "d999")
    with pytest.raises(ValueError, match=r"flash_ext: --rows='\(' is no regular expression"):
        select_rows("cuda", "(")


# ---------------------------------------------------------------------------------------------------------------------
# Turns.


def test_turns_are_taken_in_alternating_order() -> None:
    assert list(order_of_turns(["a", "b", "c"], 3)) == [
        (turn, name) for turn, names in enumerate(("abc", "cba", "abc")) for name in names
    ]


def test_every_turn_is_recorded_in_its_context() -> None:
    active: list[str] = []
    seen: list[tuple[str, list[str]]] = []

    class Context(nullcontext[None]):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __enter__(self) -> None:
            active.append(self.name)

        def __exit__(self, *_: object) -> None:
            active.remove(self.name)

    calls = {name: lambda name=name: seen.append((name, list(active))) for name in "ab"}
    contexts = {name: lambda name=name: Context(name) for name in "ab"}
    seconds = take_turns(calls, contexts, rounds=4, timer=FAST)
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4}
    assert all(time > 0 for times in seconds.values() for time in times)
    assert seen and all(inside == [name] for name, inside in seen)


def test_wall_clock_repeats_for_as_long_as_asked() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        torch.empty(1000).normal_()

    assert Timer("cpu", warmup_ms=0, rep_ms=20)(call) < 0.02
    assert count > 4


# ---------------------------------------------------------------------------------------------------------------------
# Statistics.


def test_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    # The third round is slow for both; a ratio of the medians, 1.5 / 1 = 1.5, would be wrong.
    one = measurement([1.0, 1.0, 4.0], [1.2, 1.5, 4.0])
    assert one.ratio(OURS, "cudnn") == pytest.approx(1.2)
    assert one.tflops(OURS) == pytest.approx(1.0)
    assert one.ratio("cudnn", "fa3") is None


@pytest.mark.parametrize(
    ("reached", "floor", "word"),
    [(1.2, 1.1, "pass"), (1.1, 1.1, "pass"), (1.08, 1.1, "tie"), (1.0, 1.1, "below"), (1.2, None, "-")],
)
def test_verdicts(reached: float, floor: float | None, word: str) -> None:
    one = measurement([1.0] * 3, [reached] * 3, floor=floor)
    assert judge(one, recording(one)).word == word


def test_not_run_is_no_pass() -> None:
    one = measurement([], [1.0])
    assert judge(one, recording(one)).word == "not run"
    good = measurement([1.0] * 3, [2.0] * 3, row="b")
    (summary,) = summarise(recording(good))
    assert summary.meets
    (summary,) = summarise(recording(one, good))
    assert not summary.meets


def test_summary_needs_the_mean_and_every_row() -> None:
    fast, tie, slow = (measurement([1.0] * 3, [r] * 3, row=f"r{r}") for r in (1.3, 0.985, 0.9))
    (summary,) = summarise(recording(fast, tie))
    assert summary.meets and summary.mean_score == pytest.approx(math.sqrt(1.3 * 0.985))
    (summary,) = summarise(recording(fast, tie, slow))
    assert summary.mean_score is not None and summary.mean_score > 1.0
    assert not summary.meets and summary.counts == {"pass": 1, "tie": 1, "below": 1}
    ties = [measurement([1.0] * 3, [0.985] * 3, row=f"t{i}") for i in range(3)]
    (summary,) = summarise(recording(*ties))
    assert not summary.meets  # each row is a tie, the mean is below 1


def test_two_rounds_meet_no_floor() -> None:
    (summary,) = summarise(recording(measurement([1.0] * 2, [1.3] * 2)))
    assert summary.counts == {"pass": 1} and not summary.meets


def test_deterministic_mode_has_goals_of_its_own() -> None:
    """0.85 of the default mode in the mean, 0.75 in every row, no tie."""

    def compared(*ratios: float) -> Recording:
        rows = [
            Measurement(f"r{i}", "training", "backward", 1e12, results.DEFAULT, results.DETERMINISTIC_ROW)
            for i in range(len(ratios))
        ]
        for row, ratio in zip(rows, ratios, strict=True):
            row.seconds = {OURS: [1.0] * 3, results.DEFAULT: [ratio] * 3}
        return recording(*rows)

    (summary,) = summarise(compared(0.95, 0.80))
    assert summary.meets and summary.mean_ratio == pytest.approx(math.sqrt(0.95 * 0.80))
    (summary,) = summarise(compared(1.0, 0.74))
    assert not summary.meets and summary.counts == {"pass": 1, "below": 1}
    (summary,) = summarise(compared(0.84, 0.84))
    assert not summary.meets and summary.counts == {"pass": 2}


def test_share_of_another_row() -> None:
    other = measurement([1.0], [1.0], row="dense")
    share = Measurement("packed", "varlen", "forward", 0.97e12, "cudnn", None, ("dense", 0.95), {OURS: [1.0]})
    assert judge(share, recording(other, share)).word == "pass"
    share.flop = 0.90e12
    assert judge(share, recording(other, share)).word == "below"
    assert judge(share, recording(share)).word == "-"  # the other row was not measured
    share.floor, share.seconds["cudnn"] = 1.0, [1.5]  # with a floor and a reference, these decide
    assert judge(share, recording(other, share)).word == "pass"
    del share.seconds["cudnn"]
    assert judge(share, recording(other, share)).word == "below"


def test_recordings_survive_the_file(tmp_path: Path) -> None:
    before = recording(
        measurement([1.0, 2.0], [1.5, 1.5]),
        Measurement("packed", "varlen", "backward", 1e12, "cudnn", None, ("a", 0.95), {}, {OURS: "no kernel"}),
    )
    file = tmp_path / "new" / "a.json"
    results.save(before, file)
    after = results.load(file)
    assert after == before
    document = json.loads(file.read_text())
    assert document["measurements"][0]["seconds"] == {OURS: [1.0, 2.0], "cudnn": [1.5, 1.5]}
    assert document["measurements"][0]["derived"]["verdict"]["word"] == "pass"


def test_a_recording_without_git_names_the_commit_of_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_ext, "__file__", str(tmp_path / "flash_ext" / "__init__.py"))
    assert cli._commit() == flash_ext.build_info()["module"]["commit"] != ""


@pytest.mark.parametrize("text", ["", "{}", '{"format": 99}', "[1]"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="flash_ext: .*other.json"):
        results.load(file)


def test_floors_of_the_sm80_path_are_fa2() -> None:
    assert reference_for("cuda", "sm80") == "fa2"
    assert reference_for("cuda", "sm90") == "cudnn"
    assert reference_for("cpu", "cpu") == "sdpa"


# ---------------------------------------------------------------------------------------------------------------------
# Measuring, with the small rows of the cpu.


def run_small(direction: str, *providers: Provider, row: str = "b1 s512 h4/2 d128 causal") -> Measurement:
    (chosen,) = select_rows("cpu", f"^{row}$")
    return measure(
        chosen,
        direction,
        providers=list(providers),
        reference="sdpa",
        device=CPU,
        dtype=torch.bfloat16,
        rounds=2,
        timer=FAST,
    )


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_measuring_on_the_cpu(direction: str) -> None:
    result = run_small(direction, *providers_for("cpu"))
    assert not result.unavailable
    assert {name: len(times) for name, times in result.seconds.items()} == {OURS: 2, "sdpa": 2}
    assert 0 < result.difference[OURS] < 0.02


def test_wrong_results_are_not_timed() -> None:
    ours, sdpa = providers_for("cpu")
    wrong = Provider(OURS, lambda x: lambda: ours.bind(x)().flip(1))
    result = run_small("forward", wrong, sdpa)
    assert list(result.seconds) == ["sdpa"]
    assert "wrong result" in result.unavailable[OURS]

    broken = Provider(OURS, lambda x: lambda: ours.bind(x)() * float("nan"))
    assert "wrong result" in run_small("forward", broken, sdpa).unavailable[OURS]


def test_what_a_provider_raises_is_recorded() -> None:
    def refuse(_: object) -> None:
        raise NotImplementedError("flash_ext: no kernel\nand more")

    _, sdpa = providers_for("cpu")
    turns = 0

    def count() -> None:
        nonlocal turns
        turns += 1

    (row,) = select_rows("cpu", "^b2 s256 h4 d64 full$")
    result = measure(
        row,
        "forward",
        providers=[Provider(OURS, refuse), sdpa],  # type: ignore[arg-type]
        reference="sdpa",
        device=CPU,
        dtype=torch.bfloat16,
        rounds=2,
        timer=FAST,
        on_turn=count,
    )
    assert result.unavailable == {OURS: "NotImplementedError: flash_ext: no kernel"}
    assert turns == 4  # the progress bar ends full


def test_packed_inputs() -> None:
    (row,) = (row for row in load_rows() if row.packed)
    small = type(row)("varlen", (3, 1, 5), 2, 1, 64, True, packed=True, label="x")
    inputs = make_inputs(small, CPU, torch.float16, requires_grad=True)
    assert inputs.q.shape == (9, 2, 64) and inputs.k.shape == (9, 1, 64)
    assert inputs.cu_seqlens is not None and inputs.cu_seqlens.tolist() == [0, 3, 4, 9]
    assert inputs.cu_seqlens.dtype == torch.int32
    assert inputs.v.requires_grad and not inputs.dout.requires_grad


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_packed_rows_reach_torch_as_jagged_tensors() -> None:
    """PyTorch's CPU serves only full masks and equal heads this way; it shows that layouts and gradients are right."""
    ours, sdpa = providers_for("cpu")
    (row,) = (row for row in load_rows() if row.packed)
    small = dataclasses.replace(row, lengths=(30, 5, 64), heads_q=2, heads_k=2, head_dim=16, causal=False)
    inputs = make_inputs(small, CPU, torch.float16, requires_grad=True)
    results = []
    for provider in (ours, sdpa):
        out = provider.bind(inputs)()
        results.append((out, *torch.autograd.grad(out, (inputs.q, inputs.k, inputs.v), inputs.dout)))
    for got, expected in zip(*results, strict=True):
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, atol=5e-3, rtol=1e-2)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown.


def shown(function: object, *arguments: object) -> str:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=200, record=True, file=io.StringIO())
    function(*arguments, console)  # type: ignore[operator]
    return str(console.export_text())


def test_printed_recording() -> None:
    refused = Measurement("c", "training", "forward", 1e12, "cudnn", 1.0, None, {"cudnn": [1.0]}, {OURS: "no kernel"})
    text = shown(print_recording, recording(measurement([0.5], [1.0], row="b4 s1", floor=1.5), refused))
    (line,) = (line for line in text.splitlines() if "b4 s1" in line)
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == [
        "b4 s1",
        "2",
        "1",
        "2.000",
        "1.50",
        "1.333",
        "pass",
    ]
    assert "1.333 of the floors; 1 pass, 1 not run; floors not met" in text
    assert "not measured: flash_ext, c forward: no kernel" in text


def test_printed_comparison() -> None:
    a = recording(measurement([1.0], [1.0]))
    b = recording(measurement([0.5], [0.8]))
    text = shown(lambda *args: print_comparison(a, b, ("a.json", "b.json"), args[-1]))
    assert "speed 2.000, ratio to the reference 1.600" in text


def test_plots_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from flash_ext.bench.plots import plot_recording

    both = recording(measurement([1.0, 1.1], [1.2, 1.2]), measurement([1.0], [1.2], direction="backward"))
    files = plot_recording(both, tmp_path / "plots")
    assert [file.name for file in files] == ["forward.png", "backward.png"]
    assert all(file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 10_000 for file in files)
