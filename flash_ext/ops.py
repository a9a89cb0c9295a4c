"""``torch.ops.flash_ext.fwd`` and ``torch.ops.flash_ext.bwd``, and the one `torch.autograd.Function` around them.

Who calls what, from the top::

    public function (interface.py) ──── plain eager mode ────┐
        │ compiling, tracing, a mode, a subclass, autocast   │
        v                                                    v
    torch.ops.flash_ext.fwd ── Autocast ── Autograd ──> Attention (autograd.Function), if a gradient is wanted
        │                                                    │
        v                                                    v
    backend kernel of the operator ─────────────────> run_forward / run_backward: check, then dispatch

`run_forward` and `run_backward` are the same on every way. The direct way past the dispatcher is taken only when
nothing could want to see the operator; `is_plain_eager` says exactly when.

What torch's machinery finds here:

* fakes (FakeTensorMode, ``torch.compile``, ``torch.export``, the meta device), which run the same checks;
* Autograd: gradients of q, k, v and sinks through ``out`` and ``lse``; a second derivative, forward-mode AD and the
  transforms of ``torch.func`` are refused by name, never answered wrongly;
* Autocast: q, k and v are cast to the autocast dtype, as for ``scaled_dot_product_attention``;
* FLOP formulas for ``torch.utils.flop_counter``, which follow torch's own for attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.autograd.forward_ad
import torch.utils.flop_counter

from . import checks, dispatch
from .allocate import empty_like
from .checks import DTYPES, MAX_INT32, check_backward, check_forward, lse_shape_of

__all__ = [
    "KV_PACKED",
    "PACKED_DIM",
    "QKV_PACKED",
    "SEPARATE",
    "Attention",
    "Options",
    "any_autocast",
    "autocast_operands",
    "bwd",
    "fwd",
    "is_plain_eager",
    "refuse_transforms",
    "run_backward",
    "run_forward",
    "run_plain_forward",
    "unpack",
    "wants_gradient",
]

Options = dict[str, Any]  # the keywords of the operators' schemas, absent ones at their defaults

_KEYWORDS = (
    "*, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, Tensor? block_table=None, float? softmax_scale=None, "
    "bool causal=False, SymInt window_left=-1, SymInt window_right=-1, float softcap=0., Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, float dropout_p=0., Tensor? rng_state=None, Tensor? q_descale=None, Tensor? k_descale=None, "
    "Tensor? v_descale=None, SymInt num_splits=0, SymInt sm_margin=0, bool deterministic=False"
)

# Neither operator mutates or aliases an argument: outputs are fresh and contiguous. Any strides are right, but some
# cost a copy, so compilers are to hand over tensors as eager mode lays them out (torch before 2.7: in that order).
_TAGS = (torch.Tag.pt2_compliant_tag, getattr(torch.Tag, "needs_exact_strides", torch.Tag.needs_fixed_stride_order))
_library = torch.library.Library("flash_ext", "DEF")
_library.define(f"fwd(Tensor q, Tensor k, Tensor v, {_KEYWORDS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_library.define(
    f"bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_KEYWORDS}) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    tags=_TAGS,
)

fwd = torch.ops.flash_ext.fwd.default
bwd = torch.ops.flash_ext.bwd.default

# ---------------------------------------------------------------------------------------------------------------------
# The one way down: check, then dispatch.

_deterministic_mode = torch._C._get_deterministic_algorithms


def _resolve(options: Options) -> Options:
    """What the call means now: torch's deterministic mode, and window bounds as the kernels count, in 32 bits.

    A bound beyond that is as good as none: no sequence is longer.
    """
    if _deterministic_mode():
        options = {**options, "deterministic": True}
    if not options:
        return options
    if "window_left" in options or "window_right" in options:
        left, right = options.get("window_left", -1), options.get("window_right", -1)
        options = {**options, "window_left": min(left, MAX_INT32), "window_right": min(right, MAX_INT32)}
    return options


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """What lies in memory as the tensor says: kernels know neither lazy negation nor zeros that were never written."""
    if tensor.is_neg():
        return tensor.resolve_neg()
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _all_in_memory(options: Options) -> Options:
    return {name: _in_memory(value) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def run_plain_forward(q: Any, k: Any, v: Any, options: Options) -> tuple[torch.Tensor, torch.Tensor] | None:
    """`run_forward` in less than half its time, for arguments that are certainly fit; None: nothing was done."""
    if checks.VALIDATE or q.is_neg() or k.is_neg() or v.is_neg():
        return None
    return dispatch.plain_forward(q, k, v, options, _deterministic_mode())


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments and compute ``(out, lse)``; real tensors only, no gradients."""
    results = run_plain_forward(q, k, v, options)
    if results is not None:
        return results
    check_forward(q, k, v, **options)
    q, k, v = map(_in_memory, (q, k, v))
    return dispatch.forward(q, k, v, **_all_in_memory(_resolve(options)))


def run_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Check the arguments and compute ``(dq, dk, dv, dsinks)``, into ``dq, dk, dv`` (any strides) where given."""
    check_backward(dout, dlse, q, k, v, out, lse, **options)
    dout, q, k, v, out, lse = map(_in_memory, (dout, q, k, v, out, lse))
    if dlse is not None:
        dlse = _in_memory(dlse)
    options = _all_in_memory(_resolve(options))
    return dispatch.backward(dout, dlse, q, k, v, out, lse, **options, dq=dq, dk=dk, dv=dv)


# ---------------------------------------------------------------------------------------------------------------------
# When the dispatcher may be passed by.

_EXACT_TENSORS = (torch.Tensor, torch.nn.Parameter)
_forward_ad = torch.autograd.forward_ad
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functorch_transform = torch._C._functorch.peek_interpreter_stack
_jit_tracing = torch._C._get_tracing_state
_is_grad_enabled = torch.is_grad_enabled


_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_PRE_DISPATCH = torch._C.DispatchKey.PreDispatch  # where make_fx(pre_dispatch=True) and torch.export keep their mode


def _is_any_autocast_enabled_by_device() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


any_autocast: Callable[[], bool] = getattr(torch._C, "_is_any_autocast_enabled", _is_any_autocast_enabled_by_device)


def is_plain_eager(tensors: Sequence[Any], options: Options) -> bool:
    """Whether the call may pass by the dispatcher: nothing but plain tensors, and nobody watching.

    False under any ``__torch_dispatch__`` mode (FakeTensorMode, make_fx, FlopCounterMode, selective checkpointing),
    under a transform of ``torch.func``, in forward-mode AD, while ``torch.jit.trace`` records, under autocast, and for
    tensor subclasses and the meta device. Of what Dynamo traces (``torch.compiler.is_compiling``) callers take care
    themselves; all other parts of the compiler have a mode active.
    """
    if (
        _dispatch_modes() != 0
        or _functorch_transform() is not None
        or _is_key_included(_PRE_DISPATCH)
        or any_autocast()
        or _forward_ad._current_level >= 0  # -1 outside of every dual_level
        or _jit_tracing() is not None
    ):
        return False
    for tensor in tensors:
        if type(tensor) not in _EXACT_TENSORS:
            return False
    for value in options.values():
        if isinstance(value, torch.Tensor) and type(value) not in _EXACT_TENSORS:
            return False
    return not tensors[0].is_meta  # the others are on its device, or refused by the checks


def _never(tensor: Any) -> bool:
    return False


# torch.autograd.grad(is_grads_batched=True) gives a backward gradients that look like plain tensors.
_is_legacy_batched: Callable[[Any], bool] = getattr(torch._C._functorch, "is_legacy_batchedtensor", _never)


def _is_plain_backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, tensors: tuple[torch.Tensor, ...], options: Options
) -> bool:
    """Of a backward; never while Dynamo reads this code (compiled autograd)."""
    if _is_dynamo_compiling() or _is_legacy_batched(dout):
        return False
    if dlse is None:
        return is_plain_eager((*tensors, dout), options)
    return is_plain_eager((*tensors, dout, dlse), options) and not _is_legacy_batched(dlse)


def _call_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options, plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` below autograd: directly, or through the operator's backend kernel or fake."""
    if plain:
        return run_forward(q, k, v, options)
    with torch._C._AutoDispatchBelowAutograd():
        return fwd(q, k, v, **options)


def _call_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(dq, dk, dv, dsinks)`` below autograd; see `_call_forward`."""
    if _is_plain_backward(dout, dlse, (q, k, v), options):
        return run_backward(dout, dlse, q, k, v, out, lse, options)
    if _is_dynamo_compiling():  # it cannot enter the guard below
        return bwd(dout, dlse, q, k, v, out, lse, **options)
    with torch._C._AutoDispatchBelowAutograd():
        return bwd(dout, dlse, q, k, v, out, lse, **options)


# ---------------------------------------------------------------------------------------------------------------------
# Autograd.

#: How q, k and v come to `Attention`: apart, k and v in one tensor, or all three; with the dimension that joins them.
SEPARATE, KV_PACKED, QKV_PACKED = 0, 1, 2
PACKED_DIM = -3  # (..., 3 or 2, heads, head_dim)


def unpack(packing: int, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """q, k and v as strided views of what the caller gave."""
    if packing == SEPARATE:
        return tensors
    return (*tensors[:-1], *tensors[-1].unbind(PACKED_DIM))


def wants_gradient(tensors: Iterable[torch.Tensor], *others: Any) -> bool:
    """Whether autograd has to record a call with these tensors; of others only those that are tensors count."""
    if not _is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor.requires_grad:
            return True
    for other in others:
        if isinstance(other, torch.Tensor) and other.requires_grad:
            return True
    return False


def _refuse_double_backward() -> NoReturn:
    raise NotImplementedError(
        "flash_ext: a second derivative (double backward, create_graph=True) of flash_ext::fwd is not implemented; "
        "expected first derivatives only"
    )


class _Backward(torch.autograd.Function):
    """The gradients as a node of the graph whose own gradient is refused by name.

    `torch.autograd.function.once_differentiable` would serve, but its error does not say which function it is about,
    and it lets the dependence on q, k and v go unnoticed when the incoming gradient does not require one itself.
    """

    @staticmethod
    def forward(ctx: Any, options: Options, sinks: torch.Tensor | None, *arguments: Any) -> Any:
        dout, dlse, q, k, v, out, lse = arguments
        return _call_backward(dout, dlse, q, k, v, out, lse, options)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_double_backward()


class Attention(torch.autograd.Function):
    """``out, lse = Attention.apply(options, packing, plain, sinks, *tensors)``; the only place that knows autograd.

    ``tensors`` are q, k, v (`SEPARATE`), q, kv (`KV_PACKED`) or qkv alone (`QKV_PACKED`); ``plain`` is what
    `is_plain_eager` said of them. In plain eager mode the gradients of a packed tensor are written into one tensor
    through strided views; otherwise they are stacked.
    """

    @staticmethod
    def forward(
        ctx: Any, options: Options, packing: int, plain: bool, sinks: torch.Tensor | None, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = unpack(packing, tensors)
        out, lse = _call_forward(q, k, v, options, plain)
        ctx.set_materialize_grads(False)
        ctx.packing = packing
        # Tensors go through save_for_backward, so that a change in place between forward and backward is an error and
        # saved-tensor hooks see them.
        names = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
        ctx.options = {name: value for name, value in options.items() if name not in names} if names else options
        ctx.tensor_options = names
        ctx.save_for_backward(*tensors, out, lse, *[options[name] for name in names])
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Any:
        packing = ctx.packing
        saved = ctx.saved_tensors
        count = 3 - packing
        tensors, (out, lse), kept = saved[:count], saved[count : count + 2], saved[count + 2 :]
        if dout is None and dlse is None:
            return (None,) * (count + 4)
        if dout is None:
            dout = torch.zeros_like(out)
        options = {**ctx.options, **dict(zip(ctx.tensor_options, kept, strict=True))}
        q, k, v = unpack(packing, tensors)

        grads: tuple[torch.Tensor, ...]
        if torch.is_grad_enabled():  # create_graph=True
            *grads_qkv, dsinks = _Backward.apply(options, options.get("sinks"), dout, dlse, q, k, v, out, lse)
        elif packing != SEPARATE and _is_plain_backward(dout, dlse, tensors, options):
            grads = tuple(empty_like(tensor) for tensor in tensors)
            dq, dk, dv = unpack(packing, grads)
            *_, dsinks = run_backward(dout, dlse, q, k, v, out, lse, options, dq=dq, dk=dk, dv=dv)
            return None, None, None, dsinks if ctx.needs_input_grad[3] else None, *grads
        else:
            *grads_qkv, dsinks = _call_backward(dout, dlse, q, k, v, out, lse, options)
        if packing == SEPARATE:
            grads = tuple(grads_qkv)
        else:
            apart, joined = grads_qkv[: count - 1], grads_qkv[count - 1 :]
            grads = (*apart, torch.stack(joined, PACKED_DIM))
        return None, None, None, dsinks if ctx.needs_input_grad[3] else None, *grads


def _refuse_unsupported_autograd(tensors: Iterable[Any], what: str) -> None:
    """Forward-mode AD and torch.func: an error here, where the answer would be a zero tangent or an internal assert."""
    if _forward_ad._current_level >= 0:
        for tensor in tensors:
            if tensor is not None and _forward_ad.unpack_dual(tensor).tangent is not None:
                raise NotImplementedError(
                    f"flash_ext: forward-mode AD (torch.func.jvp, dual tensors) of {what} is not implemented; "
                    "expected reverse mode (torch.autograd)"
                )
    if _functorch_transform() is not None and wants_gradient((), *tensors):
        raise NotImplementedError(
            f"flash_ext: torch.func transforms (grad, vjp, jacrev) of {what} are not implemented; "
            "expected torch.autograd (backward, torch.autograd.grad)"
        )


def _fwd_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    sinks = options.get("sinks")
    _refuse_unsupported_autograd((q, k, v, sinks), "flash_ext::fwd")
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.requires_grad:  # refused by the checks; a fake below autograd no longer shows it
        check_forward(q, k, v, **options)
    plain = is_plain_eager((q, k, v), options)
    if wants_gradient((q, k, v), sinks):
        return Attention.apply(options, SEPARATE, plain, sinks, q, k, v)
    return _call_forward(q, k, v, options, plain)


def _bwd_autograd(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sinks = options.get("sinks")
    differentiable = (dout, dlse, q, k, v, out, lse, sinks)
    _refuse_unsupported_autograd(differentiable, "flash_ext::bwd")
    if wants_gradient((), *differentiable):
        return _Backward.apply(options, sinks, dout, dlse, q, k, v, out, lse)
    return _call_backward(dout, dlse, q, k, v, out, lse, options)


_library.impl("fwd", _fwd_autograd, "Autograd")
_library.impl("bwd", _bwd_autograd, "Autograd")

# ---------------------------------------------------------------------------------------------------------------------
# Backend kernels and fakes.


def _fwd_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return run_forward(q, k, v, options)


def _bwd_backend(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return run_backward(dout, dlse, q, k, v, out, lse, options)


def _fwd_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_forward(q, k, v, **options)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(lse_shape_of(q), dtype=torch.float32)


def _bwd_fake(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_backward(dout, dlse, q, k, v, out, lse, **options)
    sinks = options.get("sinks")
    dsinks = q.new_empty((0,), dtype=torch.float32) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


_library.impl("fwd", _fwd_backend, "CompositeExplicitAutograd")
_library.impl("bwd", _bwd_backend, "CompositeExplicitAutograd")
torch.library.register_fake("flash_ext::fwd", _fwd_fake, lib=_library)
torch.library.register_fake("flash_ext::bwd", _bwd_fake, lib=_library)

# ---------------------------------------------------------------------------------------------------------------------
# Autocast.

_AUTOCAST_INPUTS = (torch.float32, *DTYPES)


def autocast_operands(tensors: tuple[torch.Tensor, ...], device_type: str) -> tuple[torch.Tensor, ...]:
    """Operands in the autocast dtype of the device type, as autocast does for ``scaled_dot_product_attention``.

    Other dtypes (fp8, fp64, integers), and what is no tensor, stay as they are, to be refused by name.
    """
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.dtype in _AUTOCAST_INPUTS else tensor
        for tensor in tensors
    )


def _register_autocast(device_type: str, key: str) -> None:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def fwd_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return fwd(*autocast_operands((q, k, v), device_type), **options)

    _library.impl("fwd", fwd_autocast, key)


_register_autocast("cpu", "AutocastCPU")
_register_autocast("cuda", "AutocastCUDA")

# ---------------------------------------------------------------------------------------------------------------------
# vmap.


def _refuse_vmap(*tensors: Any, **options: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_ext: vmap over flash_ext operators is not implemented; "
        "expected the mapped dimension as part of the batch dimension"
    )


def _is_batched(tensor: Any) -> bool:
    """Whether some level of vmap maps over this argument."""
    functorch = torch._C._functorch
    while isinstance(tensor, torch.Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def _draws_per_example() -> bool:
    """Whether a random number drawn here would be one for each example of a vmap."""
    functorch = torch._C._functorch
    return any(
        layer.key() == functorch.TransformType.Vmap
        and functorch.CVmapInterpreterPtr(layer).randomness() == functorch.RandomnessType.Different
        for layer in functorch.get_interpreter_stack() or ()
    )


def refuse_transforms(tensors: tuple[torch.Tensor, ...], options: Options) -> None:
    """What ``fwd`` would refuse of a call with dropout, before its random numbers are drawn."""
    if _draws_per_example() or any(map(_is_batched, (*tensors, *options.values()))):
        _refuse_vmap()
    _refuse_unsupported_autograd((*tensors, options.get("sinks")), "flash_ext::fwd")


for _name in ("fwd", "bwd"):
    for _key in ("FuncTorchBatched", "Batched"):  # torch.func.vmap; torch.autograd.grad(is_grads_batched=True)
        _library.impl(_name, _refuse_vmap, _key)

# ---------------------------------------------------------------------------------------------------------------------
# FLOPs, by torch's convention for attention: two operations per multiply-add of the matrix products, none for the
# softmax, and no discount for what a mask hides.


def _score_count(q: torch.Tensor, k: torch.Tensor, options: Options) -> int:
    """Scores per query head: the sum over sequences of seqlen_q * seqlen_k.

    For packed sequences the lengths are read from ``cu_seqlens`` if these are real tensors (as torch does; it
    synchronises, while FLOPs are counted); of fake ones only a bound is known: batch times the ``max_seqlen`` hints,
    and at most all queries times all keys.
    """
    cu_seqlens_q, cu_seqlens_k = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if all(type(cu_seqlens) is torch.Tensor and not cu_seqlens.is_meta for cu_seqlens in (cu_seqlens_q, cu_seqlens_k)):
        lengths_q, lengths_k = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
        return sum(length_q * length_k for length_q, length_k in zip(lengths_q, lengths_k, strict=True))
    bound = q.shape[0] * k.shape[0]
    max_seqlen_q, max_seqlen_k = options.get("max_seqlen_q"), options.get("max_seqlen_k")
    if max_seqlen_q is None or max_seqlen_k is None:
        return bound
    return min(bound, (cu_seqlens_q.shape[0] - 1) * max_seqlen_q * max_seqlen_k)


def _fwd_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out_val: Any = None, **options: Any) -> int:
    """Q K^T over head_dim and P V over head_dim_v."""
    return 2 * q.shape[-2] * _score_count(q, k, options) * (q.shape[-1] + v.shape[-1])


def _bwd_flops(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    out_val: Any = None,
    **options: Any,
) -> int:
    """Q K^T again, dQ and dK over head_dim; dP and dV over head_dim_v."""
    return 2 * q.shape[-2] * _score_count(q, k, options) * (3 * q.shape[-1] + 2 * v.shape[-1])


for _operator, _formula in ((torch.ops.flash_ext.fwd, _fwd_flops), (torch.ops.flash_ext.bwd, _bwd_flops)):
    torch.utils.flop_counter.register_flop_formula(_operator, get_raw=True)(_formula)
    # torch 2.4 files the formula under the overload and looks it up under the operator.
    torch.utils.flop_counter.flop_registry.setdefault(_operator, _formula)
