"""Host time of an eager call: what the caller's thread spends before it may go on, the kernel launch included."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from flash_ext.bench.providers import Inputs, Provider
from flash_ext.bench.timing import order_of_turns

# torch.empty_like twice: what any implementation pays for its output and its log-sum-exp.
TWO_ALLOCATIONS = "2 x empty_like"

# Few enough that the launches of one batch fit into the driver's queue (1,024), so that the host never waits for the
# device.
_BATCH = 200


def tiny_inputs(device: torch.device, dtype: torch.dtype) -> Inputs:
    """One tile of one head: the device has next to nothing to do. (cuDNN refuses a single key.)"""
    q, k, v, dout = (torch.randn(1, 64, 1, 64, device=device, dtype=dtype) for _ in range(4))
    return Inputs(q, k, v, dout, None, (64,), causal=False)


def time_on_host(call: Callable[[], object], device: torch.device, batches: int = 10) -> float:
    """Seconds of host time per call: the fastest of several batches, since what disturbs a host only ever adds."""

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    for _ in range(batches):
        synchronize()
        start = time.perf_counter()
        for _ in range(_BATCH):
            call()
        best = min(best, (time.perf_counter() - start) / _BATCH)
    synchronize()
    return best


def measure_host(
    providers: list[Provider], device: torch.device, dtype: torch.dtype, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Host time of a forward call without gradients, for every provider and for two allocations.

    Parameters
    ----------
    providers : list of Provider
        Who takes turns.
    device, dtype : torch.device, torch.dtype
        Of the tensors.
    rounds : int
        How often each has its turn.

    Returns
    -------
    seconds : dict of str to list of float
        Host time per call, by provider and round.
    unavailable : dict of str to str
        Why a provider was not measured.
    """
    inputs = tiny_inputs(device, dtype)

    def allocate() -> None:
        torch.empty_like(inputs.q)
        torch.empty_like(inputs.q)

    calls: dict[str, Callable[[], object]] = {TWO_ALLOCATIONS: allocate}
    unavailable: dict[str, str] = {}
    contexts = {provider.name: provider.context for provider in providers}
    with torch.no_grad():
        for provider in providers:
            try:
                with provider.context():
                    call = provider.bind(inputs)
                    call()
            except Exception as error:  # whatever a library raises is the reason why it is not measured
                unavailable[provider.name] = f"{type(error).__name__}: {error}"
            else:
                calls[provider.name] = call
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _, name in order_of_turns(list(calls), rounds):
            if name == TWO_ALLOCATIONS:
                seconds[name].append(time_on_host(calls[name], device))
                continue
            with contexts[name]():
                seconds[name].append(time_on_host(calls[name], device))
    return seconds, unavailable
