"""Host time of one eager call, layer by layer: what the caller's thread spends before it may go on.

    python benchmarks/host_overhead.py [--json FILE]

Without a GPU the calls go through the whole host code down to a make-believe library (tests/fake_library) whose launch
returns at once: the time without the launch. On a GPU they go to the real library, launch included, beside PyTorch's
scaled_dot_product_attention on its FlashAttention-2 and cuDNN backends.

Layers take turns in short batches, and each one's fastest batch counts: what disturbs a host only ever adds time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).resolve().parents[1]
_TWO_ALLOCATIONS = "2 x torch.empty_like"
_BATCH = 100  # calls; fewer than the driver's queue holds, so that the host never waits for the device
_TURNS = 200

Layers = dict[str, Callable[[], object]]


def fastest(layers: Layers, turns: int = _TURNS) -> dict[str, float]:
    """Microseconds per call of each layer's fastest batch."""
    on_gpu = torch.cuda.is_available()
    best = dict.fromkeys(layers, float("inf"))
    for call in layers.values():
        for _ in range(2):  # the first call of a kind takes a longer way than all others
            call()
    for _ in range(turns):
        for name, call in layers.items():
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(_BATCH):
                call()
            best[name] = min(best[name], (time.perf_counter() - start) / _BATCH * 1e6)
    return best


def binding_layers(path: str, device: torch.device) -> Layers:
    """The binding alone; also measured with tensors read through attributes."""
    from flash_ext import _C

    q = torch.randn(1, 64, 1, 64, device=device, dtype=torch.bfloat16)
    lse = torch.zeros(1, 1, 64, device=device)
    out = torch.empty_like(q)
    nothing = (None,) * 7
    plain: tuple[Any, ...] = (0.125, True, -1, -1, 0.0, 0.0, 0, 0, False)
    asked: tuple[Any, ...] = (*nothing[:6], *plain[:6], False)
    layers: Layers = {"_C.features": lambda: _C.features(*asked)}
    if any(kernel["direction"] == "forward" for kernel in _C.kernels(path)):
        layers["_C.forward"] = lambda: _C.forward(path, q, q, q, out, lse, *nothing, *plain)
    else:
        filled = torch.zeros(64, device=device)
        layers["_C.probe"] = lambda: _C.probe(path, filled, 1.0)
    return layers


def all_layers(path: str, device: torch.device) -> Layers:
    """From the allocations that any implementation needs to the public function."""
    import flash_ext
    from flash_ext import _C, allocate, checks, dispatch

    q = torch.randn(1, 64, 1, 64, device=device, dtype=torch.bfloat16)
    layers: Layers = {_TWO_ALLOCATIONS: lambda: (torch.empty_like(q), torch.empty_like(q))}
    layers["checks.check_forward"] = lambda: checks.check_forward(q, q, q, causal=True)
    layers |= binding_layers(path, device)
    layers["allocate.outputs"] = lambda: allocate.outputs(q, 64, 1, 1, 64)
    if any(kernel["direction"] == "forward" for kernel in _C.kernels(path)):
        layers["dispatch.plain_forward"] = lambda: dispatch.plain_forward(q, q, q, {"causal": True}, False)
        layers["dispatch.forward"] = lambda: dispatch.forward(q, q, q, causal=True)
        layers["flash_attn_func"] = lambda: flash_ext.flash_attn_func(q, q, q, causal=True)
        layers["torch.ops.flash_ext.fwd"] = lambda: torch.ops.flash_ext.fwd.default(q, q, q, causal=True)
    if device.type == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def sdpa(backend: SDPBackend) -> Callable[[], object]:
            def call() -> None:
                with sdpa_kernel(backend):
                    for _ in range(_INNER):
                        torch.nn.functional.scaled_dot_product_attention(heads_first, heads_first, heads_first)

            return call

        heads_first = q.transpose(1, 2)
        layers["scaled_dot_product_attention, FA2"] = sdpa(SDPBackend.FLASH_ATTENTION)
        layers["scaled_dot_product_attention, cuDNN"] = sdpa(SDPBackend.CUDNN_ATTENTION)
    return layers


# sdpa_kernel itself takes longer than a call: it is entered once for this many.
_INNER = 50


def measure(only_binding: bool) -> dict[str, float]:
    """Run in a process whose environment is set."""
    sys.path.append(str(_ROOT))  # where flash_ext is not installed
    sys.path.append(str(_ROOT / "tests"))
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        from flash_ext import _C

        device = torch.device("cuda")
        major, minor = torch.cuda.get_device_capability()
        path = os.environ.get("FLASH_EXT_PATH") or next(
            path for path in _C.available_paths() if _C.path_serves(path, major, minor)
        )
    else:
        from helpers.fake import FakeRuntime

        device, path = torch.device("cpu"), os.environ["FLASH_EXT_EMULATE"]
        FakeRuntime(path).set_idle(True)
    with torch.no_grad():
        times = fastest(binding_layers(path, device) if only_binding else all_layers(path, device))
    return {name: value / _INNER if name.startswith("scaled_dot") else value for name, value in times.items()}


def in_child(only_binding: bool, **environment: str) -> dict[str, float]:
    """`measure` in a process of its own: flash_ext reads its environment once."""
    if not torch.cuda.is_available():
        sys.path.append(str(_ROOT / "tests"))
        from helpers.fake import library_dir

        environment |= {"FLASH_EXT_EMULATE": "sm80", "FLASH_EXT_LIBRARY_DIR": str(library_dir())}
    command = [sys.executable, __file__, "--child", "binding" if only_binding else "all"]
    result = subprocess.run(command, env={**os.environ, **environment}, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(result.stdout))


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the times and the machine")
    parser.add_argument("--child", choices=("all", "binding"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child == "binding")))
        return

    times = in_child(only_binding=False)
    attributes = in_child(only_binding=True, FLASH_EXT_NO_DLPACK="1")
    times |= {f"{name}, FLASH_EXT_NO_DLPACK=1": value for name, value in attributes.items() if name != "_C.features"}
    on_gpu = torch.cuda.is_available()
    machine: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_gpu else "none: the launch returns at once",
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print("; ".join(f"{name} {value}" for name, value in machine.items()))
    print(f"{'us/call':>9}  {'beyond 2 allocations':>20}")
    for name, value in times.items():
        beyond = (
            f"{value - times[_TWO_ALLOCATIONS]:20.2f}" if name.startswith(("flash_attn", "torch.ops")) else " " * 20
        )
        print(f"{value:9.2f}  {beyond}  {name}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "microseconds": times}, indent=2) + "\n")


if __name__ == "__main__":
    main()
