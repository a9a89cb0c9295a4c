"""Times a training step with flash_ext's attention and with PyTorch's: whole model, loss, backward and AdamW.

Two models of ``tests/helpers/byte_gpt.py``: the test suite's GPT, fp32 weights and bf16 attention, where attention is a
small part; and two layers of a 1.3-billion-parameter shape (width 2048, 16 heads of 128) at 4,096 tokens, all bf16.
Attentions take turns, each in every round; peak memory is that of one step beyond what was allocated before the model.

    python benchmarks/training_step.py [--rounds N] [--json FILE] [--quick]

Needs a GPU; ``--quick`` runs tiny models anywhere, to see that it works. Exit status 1: the losses
differ.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from helpers.byte_gpt import Attention, ByteGpt, Size, attend_flash_ext, attend_sdpa, batches

import flash_ext
from flash_ext import info
from flash_ext.bench.providers import FLASH_EXT, LABELS, TORCH_CUDNN, TORCH_FA2, TORCH_SDPA, Provider
from flash_ext.bench.timing import Timer, take_turns

MODELS = {
    "GPT of the tests, 4 layers, 4/2 heads of 64, 16 x 256 tokens": (
        Size(layers=4, heads=4, heads_k=2, head_dim=64, rows=256, batch=16, steps=1),
        torch.float32,
    ),
    "1.3B shape, 2 layers, 16 heads of 128, 4 x 4096 tokens": (
        Size(layers=2, heads=16, heads_k=16, head_dim=128, rows=4096, batch=4, steps=1),
        torch.bfloat16,
    ),
}
QUICK_MODELS = {
    "tiny, 2 layers, 2/1 heads of 16, 2 x 64 tokens": (
        Size(layers=2, heads=2, heads_k=1, head_dim=16, rows=64, batch=2, steps=1),
        torch.float32,
    ),
}
# Two right attentions differ by rounding; a wrong mask by whole nats.
LARGEST_LOSS_DIFFERENCE = 0.02


def attentions(device: torch.device) -> list[tuple[Provider, Attention]]:
    """flash_ext first, then PyTorch's; those that need a GPU only there."""
    if device.type != "cuda":
        return [(FLASH_EXT, attend_flash_ext), (TORCH_SDPA, attend_sdpa)]
    return [(FLASH_EXT, attend_flash_ext), (TORCH_CUDNN, attend_sdpa), (TORCH_FA2, attend_sdpa)]


def make_step(size: Size, dtype: torch.dtype, attention: Attention, device: torch.device) -> Callable[[], Tensor]:
    """A model and its optimizer; the step returns the loss before it."""
    torch.manual_seed(0)
    model = ByteGpt(size, attention).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = batches(size, 0, device)[0]

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss: Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def peak_of_a_step(
    make: Callable[[], Callable[[], Tensor]],
    context: Callable[[], AbstractContextManager[object]],
    device: torch.device,
) -> tuple[float, float | None]:
    """Loss of the first step; bytes at the peak of the second, or None without a GPU. Nothing is kept."""
    gc.collect()
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with context():
        step = make()
        loss = step().item()
        if device.type != "cuda":
            return loss, None
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        torch.cuda.synchronize(device)
    return loss, float(torch.cuda.max_memory_allocated(device) - before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="turns of each attention (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the recording")
    parser.add_argument("--quick", action="store_true", help="a tiny model, on a CPU too")
    arguments = parser.parse_args()
    if not arguments.quick and not torch.cuda.is_available():
        parser.error("PyTorch can use no GPU here; --quick runs a tiny model on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    timer = Timer(device.type, warmup_ms=100, rep_ms=1000) if not arguments.quick else Timer(device.type, 0, 0)
    console = Console(width=None if sys.stdout.isatty() else 160)
    machine = info.machine()
    info.print_pairs(info.machine_lines(machine))

    failed = False
    recorded = []
    for name, (size, dtype) in (QUICK_MODELS if arguments.quick else MODELS).items():
        losses: dict[str, float] = {}
        peaks: dict[str, float | None] = {}
        steps: dict[str, Callable[[], Tensor]] = {}
        contexts: dict[str, Callable[[], AbstractContextManager[object]]] = {}
        for provider, attention in attentions(device):

            def make(
                attention: Attention = attention, size: Size = size, dtype: torch.dtype = dtype
            ) -> Callable[[], Tensor]:
                return make_step(size, dtype, attention, device)

            contexts[provider.name] = provider.context
            losses[provider.name], peaks[provider.name] = peak_of_a_step(make, provider.context, device)
            with provider.context():
                steps[provider.name] = make()
        seconds = take_turns(steps, contexts, arguments.rounds, timer)
        failed |= max(losses.values()) - min(losses.values()) > LARGEST_LOSS_DIFFERENCE

        table = Table(title=name, title_justify="left")
        for title in ("attention", "step, ms", "/ flash_ext", "peak memory, MiB", "first loss"):
            table.add_column(title, justify="left" if title == "attention" else "right")
        ours = seconds[FLASH_EXT.name]
        for provider_name, times in seconds.items():
            ratio = statistics.median(a / b for a, b in zip(times, ours, strict=True))
            peak = peaks[provider_name]
            table.add_row(
                LABELS[provider_name],
                f"{statistics.median(times) * 1e3:.3f}",
                f"{ratio:.3f}",
                "-" if peak is None else f"{peak / 2**20:.0f}",
                f"{losses[provider_name]:.4f}",
            )
        console.print(table)
        recorded.append({"model": name, "seconds": seconds, "peak_bytes": peaks, "first_loss": losses})
        steps.clear()

    if arguments.json:
        created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        options = {"rounds": arguments.rounds, "timer": timer.description, "build": flash_ext.build_info()}
        options["build"].pop("library_dir", None)
        document = {"format": 1, "created": created, "machine": machine, "options": options, "models": recorded}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        console.print(f"recording: {arguments.json}", highlight=False)
    print("the losses differ" if failed else "the losses agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
