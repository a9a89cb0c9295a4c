"""Training end to end: a byte-level GPT on real text, and the ways in which training code runs a backward."""

from __future__ import annotations

import functools
import os
from pathlib import Path as FilePath

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.byte_gpt import ByteGpt, Size, attend_flash_ext, attend_sdpa, batches, train, write_curves
from helpers.paths import Path
from torch import Tensor

SEED = 20260101  # weights and batches are fixed, and with them what two right implementations differ by
PLOTS = FilePath(os.environ.get("FLASH_EXT_TEST_PLOTS") or FilePath(__file__).resolve().parents[1] / "build/training")
SMALL = Size(layers=2, heads=4, heads_k=2, head_dim=16, rows=64, batch=8, steps=160)
TINY = Size(layers=2, heads=2, heads_k=1, head_dim=16, rows=20, batch=1, steps=3)

needs_training = pytest.mark.needs("forward", "backward", "causal", "deterministic")
exactly = functools.partial(attend_flash_ext, deterministic=True)


def _largest_distance(one: list[float], other: list[float], *, window: int = 1) -> float:
    """Of the means over ``window`` steps: each step's batch adds noise of its own once rounding has grown."""
    apart = [a - b for a, b in zip(one, other, strict=True)]
    return max(abs(sum(apart[i : i + window]) / window) for i in range(len(apart) - window + 1))


@needs_training
@pytest.mark.timeout(400)
def test_loss_curves_lie_on_each_other(path: Path) -> None:
    """A few hundred steps with flash_ext and with PyTorch's attention, which differ by rounding alone."""
    large = Size(layers=4, heads=4, heads_k=2, head_dim=64, rows=256, batch=16, steps=400, rate=1e-3)
    size = path.fit(gpu=large, cpu=SMALL, emulated=TINY)
    reference = train(size, attend_sdpa, SEED, path.device)
    ours = train(size, attend_flash_ext, SEED, path.device)
    write_curves(
        {"scaled_dot_product_attention": reference, "flash_ext": ours},
        PLOTS / f"loss-{path.name}.png",
        f"Byte-level GPT on Python's manual, {size.steps} steps, path {path.name}",
    )
    distance = _largest_distance(reference, ours, window=path.fit(gpu=20, cpu=1, emulated=1))
    assert distance < path.fit(gpu=0.02, cpu=0.002, emulated=0.002), f"the curves are {distance:.4f} nats apart"
    if size is not TINY:
        assert sum(ours[-20:]) / 20 < ours[0] / 2, f"the loss fell only from {ours[0]:.2f} to {ours[-1]:.2f}"


def test_a_wrong_gradient_parts_the_curves() -> None:
    """What the test above sees if keys get no gradient, in a quarter of its steps."""

    def attend_wrongly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_sdpa(q, k.detach(), v)

    size = Size(**{**vars(SMALL), "steps": 50})
    curves = [train(size, attention, SEED, torch.device("cpu")) for attention in (attend_sdpa, attend_wrongly)]
    assert _largest_distance(*curves) > 0.02


def _model(path: Path, recompute: bool = False, dropout_p: float = 0.0) -> ByteGpt:
    torch.manual_seed(SEED)
    attention = functools.partial(exactly, dropout_p=dropout_p)
    return ByteGpt(_step_size(path), attention, recompute).to(path.device)


def _step_size(path: Path) -> Size:
    return path.fit(gpu=SMALL, cpu=SMALL, emulated=TINY)


def _gradients(model: ByteGpt, loss: Tensor, retain_graph: bool = False) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters, retain_graph=retain_graph), strict=True))


@needs_training
def test_backward_twice_through_one_graph(path: Path) -> None:
    """`retain_graph=True`: the second backward finds what the first found."""
    model, tokens = _model(path), batches(_step_size(path), SEED, path.device)[0]
    loss = model(tokens)
    first = _gradients(model, loss, retain_graph=True)
    for name, gradient in _gradients(model, loss).items():
        assert_same_bits(name, gradient, first[name])


@pytest.mark.needs("forward", "backward", "causal", "deterministic", "dropout")
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_activation_checkpointing(path: Path, dropout_p: float) -> None:
    """Blocks that run again in the backward, with the same dropout, give the same gradients."""
    tokens = batches(_step_size(path), SEED, path.device)[0]
    found = []
    for recompute in (False, True):
        model = _model(path, recompute, dropout_p)
        torch.manual_seed(7)
        found.append(_gradients(model, model(tokens)))
    for name, gradient in found[1].items():
        assert_same_bits(name, gradient, found[0][name])


@needs_training
@pytest.mark.timeout(300)
def test_compiled_training_step(path: Path) -> None:
    """The whole model as one graph, forward and backward compiled, learns as the eager one does."""
    size = _step_size(path)
    tokens = batches(size, SEED, path.device)[0]
    losses: list[list[float]] = []
    for compiled in (False, True):
        model = _model(path)
        step = torch.compile(model, fullgraph=True, backend=path.fit("inductor", "aot_eager", "aot_eager"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
        losses.append([])
        for _ in range(path.fit(gpu=8, cpu=8, emulated=3)):
            optimizer.zero_grad()
            loss = step(tokens) if compiled else model(tokens)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert _largest_distance(*losses) < 0.005
    assert losses[1][-1] < losses[1][0]


@needs_training
@pytest.mark.gpu
def test_captured_training_step(path: Path) -> None:
    """Forward, backward and the optimizer in one CUDA graph, replayed with new batches, learn as eager steps do."""
    size, warm = _step_size(path), 3
    tokens = batches(size, SEED, path.device)[:20]
    losses: list[list[float]] = []
    for captured in (False, True):
        model = _model(path)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        buffer = tokens[0].clone()

        def step(
            model: ByteGpt = model, optimizer: torch.optim.Optimizer = optimizer, buffer: Tensor = buffer
        ) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss: Tensor = model(buffer)
            loss.backward()
            optimizer.step()
            return loss

        seen: list[float] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # where PyTorch wants the steps before a capture
            for batch in tokens[: warm if captured else None]:
                buffer.copy_(batch)
                seen.append(step().item())
        torch.cuda.current_stream().wait_stream(side)
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                loss = step()
            for batch in tokens[warm:]:
                buffer.copy_(batch)
                graph.replay()
                seen.append(loss.item())
        losses.append(seen)
    assert _largest_distance(*losses) < 0.005
    assert losses[1][-1] < losses[1][0]
