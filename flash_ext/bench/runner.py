"""Measures rows: makes the tensors, checks that the providers agree, lets them take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flash_ext
from flash_ext.bench.providers import Inputs, Provider, make_inputs
from flash_ext.bench.results import DEFAULT, DETERMINISTIC_ROW, OURS, Measurement
from flash_ext.bench.rows import Row
from flash_ext.bench.timing import Timer, take_turns

# Two correct 16-bit implementations differ by less than a hundredth of the results' RMS; a wrong mask or a missing
# block by far more.
LARGEST_DIFFERENCE = 0.03


def measure(
    row: Row,
    direction: str,
    *,
    providers: list[Provider],
    reference: str,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    timer: Timer,
    on_turn: Callable[[], None] = lambda: None,
) -> Measurement:
    """Measures one row in one direction.

    A provider that raises, or whose results disagree with PyTorch's, is not timed; the measurement says why.

    Parameters
    ----------
    row : Row
    direction : str
        ``forward``: without gradients. ``backward``: `torch.autograd.grad` alone, on a graph built beforehand.
    providers : list of Provider
        Who takes turns, in this order.
    reference : str
        Name of the provider that ratios are taken to.
    device, dtype : torch.device, torch.dtype
        Of the tensors.
    rounds : int
        How often each provider has its turn.
    timer : Timer
    on_turn : callable
        Called once for each provider and round, measured or not.
    """
    # The floors of rows.toml are ratios to cuDNN.
    floor = {"fa2": 1.0, DEFAULT: DETERMINISTIC_ROW}.get(reference, row.floors.get(direction))
    measurement = Measurement(row.name, row.group, direction, row.flop(direction), reference, floor, row.share_of)
    inputs = make_inputs(row, device, dtype, requires_grad=direction == "backward")
    measurement.kernel = kernel_of(inputs, direction)
    calls: dict[str, Callable[[], Any]] = {}
    expected: tuple[Tensor, ...] | None = None
    # PyTorch's providers come first here: their results are what the others' are compared with.
    for provider in sorted(providers, key=lambda provider: provider.name in (OURS, "fa3")):
        try:
            with provider.context(), torch.set_grad_enabled(direction == "backward"):
                call = _call_to_time(provider, inputs, direction)
                results = _detached(call())
        except Exception as error:  # whatever a library raises is the reason why it is not measured
            measurement.unavailable[provider.name] = _reason(error)
            continue
        if expected is None:
            expected = results
        difference = max(_relative_rms(a, b) for a, b in zip(results, expected, strict=True))
        measurement.difference[provider.name] = difference
        if difference < LARGEST_DIFFERENCE:
            calls[provider.name] = call
        else:  # NaN included
            measurement.unavailable[provider.name] = f"wrong result: relative RMS difference {difference:.3g}"
    expected = None
    ordered = {provider.name: calls[provider.name] for provider in providers if provider.name in calls}
    contexts = {provider.name: provider.context for provider in providers}
    with torch.set_grad_enabled(direction == "backward"):
        measurement.seconds = take_turns(ordered, contexts, rounds, timer, on_turn)
    for _ in range((len(providers) - len(ordered)) * rounds):
        on_turn()
    return measurement


def kernel_of(inputs: Inputs, direction: str) -> str:
    """What flash_ext runs for these inputs: a kernel's name, ``cpu``, or empty if it refuses."""
    choice = flash_ext.explain(
        inputs.q,
        inputs.k,
        inputs.v,
        cu_seqlens_q=inputs.cu_seqlens,
        cu_seqlens_k=inputs.cu_seqlens,
        causal=inputs.causal,
        direction="backward" if direction == "backward" else "forward",
    )
    return choice.kernel or choice.path or ""


def _call_to_time(provider: Provider, inputs: Inputs, direction: str) -> Callable[[], Any]:
    call = provider.bind(inputs)
    if direction == "forward":
        return call
    out = call()
    sources = (inputs.q, inputs.k, inputs.v)
    return lambda: torch.autograd.grad(out, sources, inputs.dout, retain_graph=True)


def _reason(error: Exception) -> str:
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0] if message else 'no message'}"


def _detached(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    tensors = (results,) if isinstance(results, Tensor) else results
    return tuple(tensor.detach() for tensor in tensors)


def _relative_rms(result: Tensor, expected: Tensor) -> float:
    difference = (result.float() - expected.float()).square_().mean()
    return float((difference / expected.float().square().mean()).sqrt())
