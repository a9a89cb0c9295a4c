"""A small GPT over bytes, trained on the documentation that ships with Python; its attention is exchangeable."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path as FilePath
from pydoc_data import topics

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import flash_ext

__all__ = ["Attention", "ByteGpt", "Size", "attend_flash_ext", "attend_sdpa", "batches", "train", "write_curves"]

# q of shape (batch, rows, heads, head_dim), k and v with fewer heads; returns what q's shape is. Causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    """How large the model is, and how long it is trained."""

    layers: int
    heads: int
    heads_k: int
    head_dim: int
    rows: int
    batch: int
    steps: int
    rate: float = 3e-3

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.heads * self.head_dim


def attend_flash_ext(q: Tensor, k: Tensor, v: Tensor, *, deterministic: bool = False, dropout_p: float = 0.0) -> Tensor:
    """flash_ext's attention, grouped heads as they are."""
    out = flash_ext.flash_attn_func(q, k, v, dropout_p, causal=True, deterministic=deterministic)
    assert isinstance(out, Tensor)
    return out


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's own attention, with grouped heads expanded."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    """Attention and a multilayer perceptron, each with its norm before it."""

    def __init__(self, size: Size, attention: Attention) -> None:
        super().__init__()
        self.size, self.attention = size, attention
        self.norms = nn.ModuleList(nn.LayerNorm(size.width) for _ in range(2))
        self.qkv = nn.Linear(size.width, (size.heads + 2 * size.heads_k) * size.head_dim)
        self.out = nn.Linear(size.width, size.width)
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, self.size.head_dim)).to(torch.bfloat16)
        attended = self.attention(*heads.split([self.size.heads, self.size.heads_k, self.size.heads_k], dim=2))
        x = x + self.out(attended.flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


class ByteGpt(nn.Module):
    """Reads bytes, returns the mean loss of the next ones.

    Parameters
    ----------
    size : Size
    attention : Attention
        What every block attends with.
    recompute : bool
        Activation checkpointing: a block's forward runs again in the backward.
    """

    def __init__(self, size: Size, attention: Attention, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.bytes = nn.Embedding(256, size.width)
        self.positions = nn.Parameter(torch.randn(size.rows, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size, attention) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.next = nn.Linear(size.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens[:, :-1]) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return functional.cross_entropy(self.next(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


@functools.cache
def text() -> Tensor:
    """Python's reference manual as `help()` shows it: some 700 kB."""
    return torch.frombuffer(bytearray("\n".join(topics.topics.values()).encode()), dtype=torch.uint8)


def batches(size: Size, seed: int, device: torch.device) -> Tensor:
    """Random pieces of the text for every step: (steps, batch, rows + 1), int64."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text()) - size.rows, (size.steps, size.batch, 1), generator=generator)
    return text()[starts + torch.arange(size.rows + 1)].to(device, torch.int64)


def train(size: Size, attention: Attention, seed: int, device: torch.device, recompute: bool = False) -> list[float]:
    """The loss of each step of AdamW, from weights and batches that depend on the seed alone."""
    torch.manual_seed(seed)
    model = ByteGpt(size, attention, recompute).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate)
    losses = []
    for tokens in batches(size, seed, device):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def write_curves(curves: dict[str, list[float]], file: FilePath, title: str) -> None:
    """The curves as ``file`` with the suffix .json and, where matplotlib is installed, .png."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.with_suffix(".json").write_text(json.dumps({"title": title, "losses": curves}) + "\n", encoding="utf-8")
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        return
    matplotlib.use("Agg")  # no display needed
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8.0, 5.0), layout="constrained")
    for number, (name, losses) in enumerate(curves.items()):
        axes.plot(losses, label=name, linewidth=3.0 - number, color=("#56B4E9", "#D55E00", "#009E73")[number % 3])
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.legend()
    figure.savefig(file.with_suffix(".png"), dpi=120)
    pyplot.close(figure)
