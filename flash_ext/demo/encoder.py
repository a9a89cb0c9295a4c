"""A BERT encoder for sentence embeddings in plain PyTorch, with the attention left open.

All layers but attention act on one token at a time, so the same code runs on padded tokens ``(batch, seqlen, hidden)``
and on packed ones ``(total, hidden)``. Two attentions are given: the usual padded one in fp32, and flash_ext's on
packed tokens in bf16, with the padding removed before the first layer and put back after the last, as in training.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import flash_ext
from flash_ext.demo.model_files import ModelFiles

# q, k, v (..., heads, head_dim) -> out (..., heads, head_dim)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

Tokenize = Callable[[list[str]], tuple[Tensor, Tensor]]

MAX_TOKENS = 256


@dataclass(frozen=True)
class Shape:
    """The numbers of ``config.json`` that the forward pass needs."""

    layers: int
    heads: int
    epsilon: float


class Encoder:
    """BERT (Devlin et al., arXiv 1810.04805) with mean pooling and unit-length embeddings.

    Parameters
    ----------
    shape : Shape
    weights : dict of str to Tensor
        By the names of the published checkpoints, fp32.
    tokenize : callable
        Sentences to token ids and mask (1: token, 0: padding), both ``(batch, seqlen)`` int64.
    """

    def __init__(self, shape: Shape, weights: dict[str, Tensor], tokenize: Tokenize) -> None:
        self.shape = shape
        self.weights = weights
        self.tokenize = tokenize

    @classmethod
    def load(cls, files: ModelFiles, device: torch.device) -> Encoder:
        """The encoder of these files on a device; weights may be stored in fp16 or fp32.

        Raises
        ------
        ModuleNotFoundError
            If ``safetensors`` or ``tokenizers`` is not installed.
        """
        config = json.loads(files.config)
        shape = Shape(config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"])
        tokenizer = importlib.import_module("tokenizers").Tokenizer.from_str(files.tokenizer.decode("utf-8"))
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.enable_padding()  # to the longest sentence of a batch

        def tokenize(sentences: list[str]) -> tuple[Tensor, Tensor]:
            encodings = tokenizer.encode_batch(sentences)
            ids = torch.tensor([encoding.ids for encoding in encodings], device=device)
            return ids, torch.tensor([encoding.attention_mask for encoding in encodings], device=device)

        stored: dict[str, Tensor] = importlib.import_module("safetensors.torch").load(files.weights)
        weights = {
            name: tensor.to(device=device, dtype=torch.float32)
            for name, tensor in stored.items()
            if tensor.is_floating_point()
        }
        return cls(shape, weights, tokenize)

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.weights.values())

    def embed_with_plain_attention(self, sentences: list[str]) -> Tensor:
        """Sentence embeddings ``(batch, hidden)``: padded tokens, attention from the formula, everything in fp32."""
        ids, mask = self.tokenize(sentences)
        hidden = self._run_layers(self._embed_tokens(ids), plain_attention(mask))
        return self._pool(hidden, mask)

    def embed_with_flash_ext(self, sentences: list[str]) -> Tensor:
        """Sentence embeddings ``(batch, hidden)``: packed tokens, flash_ext's attention in bf16, the rest in fp32."""
        ids, mask = self.tokenize(sentences)
        packed, indices, cu_seqlens, max_seqlen, *_ = flash_ext.unpad_input(self._embed_tokens(ids), mask)
        packed = self._run_layers(packed, packed_attention(cu_seqlens, max_seqlen))
        return self._pool(flash_ext.pad_input(packed, indices, *ids.shape), mask)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return functional.layer_norm(x, weight.shape, weight, bias, self.shape.epsilon)

    def _embed_tokens(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        words = functional.embedding(ids, self.weights["embeddings.word_embeddings.weight"])
        places = functional.embedding(positions, self.weights["embeddings.position_embeddings.weight"])
        segment = self.weights["embeddings.token_type_embeddings.weight"][0]
        return self._norm("embeddings.LayerNorm", words + places + segment)

    def _run_layers(self, hidden: Tensor, attention: Attention) -> Tensor:
        for index in range(self.shape.layers):
            layer = f"encoder.layer.{index}"
            q, k, v = (
                self._linear(f"{layer}.attention.self.{name}", hidden).unflatten(-1, (self.shape.heads, -1))
                for name in ("query", "key", "value")
            )
            attended = self._linear(f"{layer}.attention.output.dense", attention(q, k, v).flatten(-2))
            hidden = self._norm(f"{layer}.attention.output.LayerNorm", hidden + attended)
            expanded = functional.gelu(self._linear(f"{layer}.intermediate.dense", hidden))
            hidden = self._norm(f"{layer}.output.LayerNorm", hidden + self._linear(f"{layer}.output.dense", expanded))
        return hidden

    @staticmethod
    def _pool(hidden: Tensor, mask: Tensor) -> Tensor:
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def plain_attention(mask: Tensor) -> Attention:
    """Attention from the formula in the dtype of q; keys whose ``mask`` (batch, seqlen) is 0 are invisible."""
    hidden_keys = (mask == 0)[:, None, None, :]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
        probabilities = scores.masked_fill(hidden_keys, float("-inf")).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", probabilities, v)

    return attend


def packed_attention(cu_seqlens: Tensor, max_seqlen: int) -> Attention:
    """flash_ext's attention in bf16 on packed tokens; the result comes back in the dtype of q."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_ext.flash_attn_varlen_func(
            q.to(torch.bfloat16),
            k.to(torch.bfloat16),
            v.to(torch.bfloat16),
            cu_seqlens,
            cu_seqlens,
            max_seqlen,
            max_seqlen,
        )
        return out.to(q.dtype)

    return attend
