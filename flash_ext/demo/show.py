"""Runs the demo and prints it."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import flash_ext
from flash_ext import info
from flash_ext.demo import accuracy, similarity
from flash_ext.demo.accuracy import Outcome
from flash_ext.demo.encoder import Encoder
from flash_ext.demo.model_files import ModelFiles, ModelNotFoundError, find_model
from flash_ext.selection import EMULATED_PATH

# Calls whose choice of a kernel is explained: label, head dim, options of the public function.
_EXPLAINED: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("causal attention, d 128", 128, {"causal": True}),
    ("its gradients", 128, {"causal": True, "direction": "backward"}),
    ("a softcap and a sliding window, d 64", 64, {"softcap": 30.0, "window_size": (256, 0)}),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``demo``."""
    parser.add_argument("--no-model", action="store_true", help="leave out the sentence encoder")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if PyTorch can use a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; returns 0 if everything that ran is within its bounds, else 1."""
    chosen = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen == "cuda" and not torch.cuda.is_available():
        raise ValueError("flash_ext: --device=cuda; PyTorch can use no GPU here, expected cpu")
    device = torch.device(chosen)
    console = Console(highlight=False, width=None if os.isatty(1) else 150)

    _heading(console, "1. The machine")
    info.print_pairs(info.machine_lines(info.machine()))

    _heading(console, "2. Which kernels run here, and why")
    _show_choices(console, device)

    _heading(console, "3. Forward and backward against an fp64 oracle")
    outcomes = _show_accuracy(console, device)

    _heading(console, "4. Real input: a sentence encoder with its attention replaced")
    lines = None if arguments.no_model else _show_similarities(console, device)
    if arguments.no_model:
        console.print("Left out (--no-model).")
    return _show_result(console, outcomes, lines)


def _heading(console: Console, text: str) -> None:
    console.print(f"\n[bold]{escape(text)}[/bold]\n")


def _show_choices(console: Console, device: torch.device) -> None:
    calls = _EXPLAINED
    if EMULATED_PATH is not None:
        console.print(f"FLASH_EXT_EMULATE: CPU tensors run the compiled {EMULATED_PATH} kernels in the PTX emulator.\n")
    elif device.type == "cpu":
        console.print("No GPU is used: every call takes the cpu path, the same contract through PyTorch. For example,")
        calls = calls[:1]
    for label, head_dim, options in calls:
        q = torch.empty(2, 512, 8, head_dim, dtype=torch.bfloat16, device=device)
        console.print(f"[bold]{escape(label)}[/bold]")
        console.print(str(flash_ext.explain(q, q, q, **options)) + "\n", markup=False, soft_wrap=True)


def _show_accuracy(console: Console, device: torch.device) -> list[Outcome]:
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=console.is_terminal) as progress:
        task = progress.add_task("comparing", total=len(accuracy.PROBLEMS))
        for outcome in accuracy.run_problems(device):
            outcomes.append(outcome)
            progress.advance(task)
    names = ("out", "lse", "dq", "dk", "dv")
    table = Table()
    table.add_column("call", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        checks = {check.name: check for check in outcome.checks}
        cells = [
            "-" if name not in checks else f"{'' if checks[name].within else '[red]'}{checks[name].error:.1e}"
            for name in names
        ]
        word = "[red]out of bounds" if not outcome.within else "[yellow]in part" if outcome.refusal else "[green]ok"
        table.add_row(outcome.problem.label, outcome.problem.shape, *cells, word)
    console.print(table)
    console.print(
        "Largest absolute errors. Bound: twice the error of the standard computation in the same type, plus one unit "
        "in\nthe last place; root mean square 1.25 times; lse 2e-5."
    )
    for refusal in dict.fromkeys(outcome.refusal for outcome in outcomes if outcome.refusal):
        console.print(f"Not run: {refusal}", markup=False, soft_wrap=True)
    return outcomes


def _show_similarities(console: Console, device: torch.device) -> list[similarity.Line] | None:
    """Compares the two encoders; None if the weights or a package that reads them is missing (said what to install)."""
    try:
        files: ModelFiles = find_model()
        encoder = Encoder.load(files, device)
    except ModelNotFoundError as error:
        console.print(f"Skipped: {error}.", markup=False, soft_wrap=True)
        return None
    except ModuleNotFoundError as error:
        console.print(f"Skipped: {error.name} is not installed: pip install safetensors tokenizers", markup=False)
        return None
    console.print(
        f"all-MiniLM-L6-v2 from {files.source}: {encoder.shape.layers} layers, {encoder.shape.heads} heads, "
        f"{encoder.parameters / 1e6:.1f} million parameters.\nUnmodified: padded, everything in fp32. With flash_ext: "
        "padding removed (unpad_input), attention in bf16 (flash_attn_varlen_func).\n",
        markup=False,
        soft_wrap=True,
    )
    lines = similarity.run_similarities(encoder)
    table = Table()
    table.add_column("sentence")
    table.add_column("closest other sentence")
    for title in ("fp32", "flash_ext", "largest difference", "ranking"):
        table.add_column(title, justify="right")
    for line in lines:
        ranking = "same" if line.same_ranking else "[red]other"
        difference = f"{'' if line.difference <= similarity.TOLERANCE else '[red]'}{line.difference:.1e}"
        table.add_row(
            escape(line.sentence), escape(line.closest), f"{line.plain:.4f}", f"{line.ours:.4f}", difference, ranking
        )
    console.print(table)
    console.print(
        "Cosine similarities. The difference is the largest over all other sentences, the ranking is of all other "
        f"sentences;\nthe bound is {similarity.TOLERANCE:g} and the same ranking."
    )
    return lines


def _show_result(console: Console, outcomes: list[Outcome], lines: list[similarity.Line] | None) -> int:
    """The last line, and the exit code."""
    complete = [outcome for outcome in outcomes if outcome.within and outcome.checks and not outcome.refusal]
    in_part = [outcome for outcome in outcomes if outcome.within and outcome.checks and outcome.refusal]
    wrong = [outcome for outcome in outcomes if not outcome.within]
    parts = [f"{len(complete)} of {len(outcomes)} calls within bounds"]
    if in_part:
        parts.append(f"{len(in_part)} in part (no kernel for the rest)")
    if wrong:
        parts.append(f"{len(wrong)} out of bounds")
    good = not wrong and bool(complete or in_part)
    if lines is None:
        parts.append("real input not run")
    else:
        fine = sum(line.within for line in lines)
        parts.append(f"{fine} of {len(lines)} sentences within bounds")
        good = good and fine == len(lines)
    word = "[green]passed[/green]" if good else "[red]FAILED[/red]"
    console.print(f"\n[bold]Result: {word}[/bold] - {'; '.join(parts)}.")
    return 0 if good else 1
