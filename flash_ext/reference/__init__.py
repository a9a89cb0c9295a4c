"""Attention without kernels: the fp64 oracle, the accuracy baseline of the tests, and the cpu path.

`fwd` and `bwd` are the cpu path, with the signature of ``torch.ops.flash_ext.fwd`` and ``bwd``. `oracle_fwd` and
`oracle_bwd` compute the same in fp64 from the formula. `baseline_fwd` and `baseline_bwd` are the standard computation
in the inputs' type, whose errors bound those of every path. `dropout_mask` returns the mask that every path uses.
"""

from .baseline import baseline_bwd, baseline_fwd
from .cpu import bwd, fwd
from .dropout import dropout_mask, dropout_threshold
from .oracle import oracle_bwd, oracle_fwd

__all__ = [
    "baseline_bwd",
    "baseline_fwd",
    "bwd",
    "dropout_mask",
    "dropout_threshold",
    "fwd",
    "oracle_bwd",
    "oracle_fwd",
]
