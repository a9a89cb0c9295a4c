"""Between padded batches and packed sequences: the helpers of ``flash_attn.bert_padding``.

::

    packed, indices, cu_seqlens, max_seqlen, used = unpad_input(hidden, attention_mask)    # (total, ...)
    out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)  # from packed
    padded = pad_input(out, indices, batch, seqlen)                                        # (batch, seqlen, ...)

All of them are differentiable in the hidden states. How many tokens there are is known only on the device, so
`unpad_input` synchronises; do it once per batch, not per layer.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .checks import check_size, check_tensor, refusal

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


_INDEX_DTYPES = (torch.int64, torch.int32)


def _check_rows(hidden_states: torch.Tensor, indices: torch.Tensor) -> None:
    """What `index_first_axis` and `pad_input` both ask of their tensors."""
    check_tensor("hidden_states", hidden_states)
    if hidden_states.ndim == 0:
        raise refusal(ValueError, "hidden_states", "has shape ()", "shape (rows, ...)")
    check_tensor("indices", indices)
    if indices.dtype not in _INDEX_DTYPES:
        raise refusal(TypeError, "indices", f"has dtype {indices.dtype}", "torch.int64 or torch.int32")
    if indices.ndim != 1:
        raise refusal(ValueError, "indices", f"has shape {tuple(indices.shape)}", "shape (total)")
    if indices.device != hidden_states.device:
        expected = f"the device of hidden_states, {hidden_states.device}"
        raise refusal(ValueError, "indices", f"is on {indices.device}", expected)


def index_first_axis(hidden_states: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor; differentiable.

    Parameters
    ----------
    hidden_states : torch.Tensor
        (rows, ...), any strides.
    indices : torch.Tensor
        (total,), int64 or int32: which rows.

    Returns
    -------
    torch.Tensor
        (total, ...), contiguous.

    Raises
    ------
    TypeError, ValueError
        If an argument is no tensor, or ``indices`` is of another dtype, rank or device.
    """
    _check_rows(hidden_states, indices)
    return hidden_states.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor, unused_mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack the tokens of a padded batch that a mask selects.

    Parameters
    ----------
    hidden_states : torch.Tensor
        (batch, seqlen, ...), any strides.
    attention_mask : torch.Tensor
        (batch, seqlen), bool or integer: 1 for a token, 0 for padding.
    unused_mask : torch.Tensor, optional
        (batch, seqlen), bool or integer: 1 for a place that is kept in the packed sequence although no token is there
        (allocated, not used). Disjoint from ``attention_mask``.

    Returns
    -------
    hidden_states : torch.Tensor
        (total, ...), the selected places, sequence after sequence.
    indices : torch.Tensor
        (total,), int64: where they were in the flattened (batch * seqlen); for `pad_input`.
    cu_seqlens : torch.Tensor
        (batch + 1,), int32: where each packed sequence starts.
    max_seqlen : int
        The longest packed sequence. Reading it synchronises with the device.
    used_seqlens : torch.Tensor
        (batch,), int32: tokens of each sequence without the unused places (``seqused``).

    Raises
    ------
    TypeError, ValueError
        If a mask is no tensor, is of another shape or of a floating dtype.
    """
    check_tensor("hidden_states", hidden_states)
    if hidden_states.ndim < 2:
        got = f"has shape {tuple(hidden_states.shape)}"
        raise refusal(ValueError, "hidden_states", got, "shape (batch, seqlen, ...)")
    masks = {"attention_mask": attention_mask}
    if unused_mask is not None:
        masks["unused_mask"] = unused_mask
    for name, mask in masks.items():
        check_tensor(name, mask)
        if mask.is_floating_point() or mask.is_complex():
            raise TypeError(f"flash_ext: {name} has dtype {mask.dtype}; expected bool or an integer dtype")
        if mask.ndim != 2 or mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"flash_ext: {name} has shape {tuple(mask.shape)}; "
                f"expected the (batch, seqlen) of hidden_states, {tuple(hidden_states.shape[:2])}"
            )
    kept = attention_mask.bool()
    used_seqlens = kept.sum(dim=-1, dtype=torch.int32)
    if unused_mask is not None:
        kept = kept | unused_mask.bool()
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(seqlens.max()) if seqlens.numel() else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, max_seqlen, used_seqlens


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """The inverse of `unpad_input`: packed tokens back to their places in a padded batch, zeros elsewhere.

    Parameters
    ----------
    hidden_states : torch.Tensor
        (total, ...).
    indices : torch.Tensor
        (total,), int64 or int32, as `unpad_input` gives them: distinct places in the flattened (batch * seqlen). Not
        read on the host: one outside of it is torch's error.
    batch, seqlen : int
        Of the padded batch.

    Returns
    -------
    torch.Tensor
        (batch, seqlen, ...), contiguous.

    Raises
    ------
    TypeError, ValueError
        If an argument is of another type, dtype, shape or device.
    """
    _check_rows(hidden_states, indices)
    check_size("batch", batch)
    check_size("seqlen", seqlen)
    if hidden_states.shape[0] != indices.shape[0]:
        raise ValueError(
            f"flash_ext: indices has shape {tuple(indices.shape)}; expected ({hidden_states.shape[0]},), "
            "one place per row of hidden_states"
        )
    indices = indices.long()  # index_copy_ takes no other
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    return padded.index_copy_(0, indices, hidden_states).view(batch, seqlen, *hidden_states.shape[1:])
