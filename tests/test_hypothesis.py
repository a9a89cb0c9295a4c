"""Shapes, layouts, lengths and options that no table thought of: drawn by hypothesis, held against the contract.

The number of examples is that of the profile: ``HYPOTHESIS_PROFILE=ci|dev|thorough`` or ``--hypothesis-profile``. A
failure prints the smallest case found and a blob that brings it back.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.allocations import GuardedAllocations
from helpers.cases import Case, make_inputs
from helpers.check import check, run, verify
from helpers.memory import CONSTANT_LAYOUTS, LAYOUTS
from helpers.paths import Path

from flash_ext.checks import SMALLEST_MAGNITUDE

# Around the tile sizes that kernels use, and anything between.
_EDGES = [
    0,
    1,
    2,
    15,
    16,
    17,
    31,
    32,
    33,
    63,
    64,
    65,
    79,
    80,
    95,
    96,
    97,
    111,
    112,
    127,
    128,
    129,
    144,
    175,
    176,
    192,
    193,
]
_VIEWS = sorted(set(LAYOUTS) - set(CONSTANT_LAYOUTS))


def lengths(path: Path) -> st.SearchStrategy[int]:
    """A sequence length."""
    return st.sampled_from(_EDGES) | st.integers(0, path.fit(gpu=1500, cpu=320, emulated=260))


@st.composite
def cases(draw: st.DrawFn, path: Path, direction: str) -> Case:
    """A case that the path has kernels for, of moderate work."""

    def option(feature: str, values: st.SearchStrategy[Any], without: Any) -> Any:
        """Drawn if some kernel has the feature; mostly absent, so that combinations stay varied."""
        if not path.supports(direction, dtype, head_dims, {feature}):
            return without
        return draw(st.just(without) | values)

    dtype = draw(st.sampled_from([torch.float16, torch.bfloat16]))
    steps = st.sampled_from([64, 128, 32, 96, 192, 256, 8, 16]) | st.integers(1, 32).map(lambda n: 8 * n)
    head_dim = draw(steps)
    head_dims = (head_dim, draw(st.just(head_dim) | steps))
    hypothesis.assume(path.supports(direction, dtype, head_dims))
    heads_k = draw(st.integers(1, 3))
    heads = (heads_k * draw(st.integers(1, 4)), heads_k)
    varlen = option("varlen", st.just(True), False)
    batch = draw(st.integers(0, 4))
    if not varlen and not path.supports(direction, dtype, head_dims, {"seqused"}):
        lengths_q, lengths_k = ((draw(lengths(path)),) * batch for _ in range(2))
    else:
        lengths_q, lengths_k = (tuple(draw(lengths(path)) for _ in range(batch)) for _ in range(2))
    between = option("seqused", st.integers(0, 70), 0)
    slack = (draw(st.integers(0, 150)), between, draw(st.integers(0, 150))) if varlen else (0, between, 0)
    bound = st.integers(-1, 5) | st.integers(-1, 300)
    # Not subnormal: libraries of torch 2.4 set the processor to flush such numbers, and then hypothesis draws none.
    any_scale = st.floats(-0.5, 0.5, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) >= SMALLEST_MAGNITUDE)
    case = Case(
        lengths_q=lengths_q,
        lengths_k=lengths_k,
        heads=heads,
        head_dims=head_dims,
        dtype=dtype,
        varlen=varlen,
        slack=slack,
        causal=option("causal", st.just(True), False),
        window=option("window", st.tuples(bound, bound), (-1, -1)),
        softcap=option("softcap", st.floats(0.5, 50.0), 0.0),
        alibi=option("alibi", st.sampled_from(["heads", "batch"]), None),
        sinks=option("sinks", st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), None),
        dropout_p=option("dropout", st.floats(0.001, 0.95), 0.0),
        softmax_scale=draw(st.none() | st.floats(0.01, 0.5))
        if not path.supports(direction, dtype, head_dims, {"general_scale"})
        else draw(st.none() | any_scale),
        deterministic=option("deterministic", st.just(True), False),
        hints=draw(st.sampled_from(["exact", "none", "short"])),
        layouts=tuple(
            (name, draw(st.just("contiguous") | st.sampled_from(_VIEWS))) for name in ("q", "k", "v", "dout")
        ),
        dlse=draw(st.booleans()),
        magnitude=draw(st.sampled_from([1.0, 0.1, 3.0])),
    )
    hypothesis.assume(path.supports(direction, dtype, head_dims, case.features))
    work = heads[0] * case.scores * max(head_dims)
    hypothesis.assume(work <= path.fit(gpu=4e9, cpu=1e8, emulated=4e7))
    return case


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.timeout(600)
def test_any_case(path: Path, direction: str) -> None:
    """Everything that the contract says of a call holds for any call."""

    @hypothesis.given(case=cases(path, direction), seed=st.integers(0, 2**32 - 1), autograd=st.booleans())
    def holds(case: Case, seed: int, autograd: bool) -> None:
        through = "autograd" if autograd else "operator"
        check(path, torch.Generator().manual_seed(seed), case, direction, through=through)

    holds()


@pytest.mark.timeout(600)
def test_views_of_one_tensor(path: Path) -> None:
    """q, k and v that overlap in memory, through any slicing and permutation: the numbers of contiguous copies."""

    @hypothesis.given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def holds(data: st.DataObject, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        order = data.draw(st.permutations(range(3)))  # where batch, rows and heads lie in memory
        extents = [data.draw(st.integers(1, limit)) for limit in (3, 130, 4)]
        margins = [data.draw(st.integers(0, 3)) for _ in range(3)]
        width = 64 + data.draw(st.sampled_from([0, 8, 1, 3]))
        memory = torch.randn([extents[i] + margins[i] for i in order] + [width], generator=rng).to(torch.bfloat16)
        memory = memory.to(path.device).permute(*[order.index(i) for i in range(3)], 3)
        views = []
        for _ in range(3):
            x = memory
            for axis in range(3):
                x = x.narrow(axis, data.draw(st.integers(0, margins[axis])), extents[axis])
            views.append(x.narrow(3, data.draw(st.integers(0, width - 64)), 64))
        before = memory.clone()
        out, lse = torch.ops.flash_ext.fwd(*views)
        expected, expected_lse = torch.ops.flash_ext.fwd(*(x.contiguous() for x in views))
        assert_same_bits("out", out, expected)
        assert_same_bits("lse", lse, expected_lse)
        assert_same_bits("the memory of the views", memory.contiguous(), before.contiguous())
        assert out.is_contiguous() and lse.is_contiguous()

    holds()


@pytest.mark.needs("varlen")
@pytest.mark.usefixtures("overlapping_rows")
@pytest.mark.timeout(600)
def test_any_lengths_on_the_device(path: Path, guarded_outputs: GuardedAllocations) -> None:
    """Any int32 in cu_seqlens and seqused: wrong rows perhaps, but no error and no write beside a result."""
    numbers = st.integers(-5, 140) | st.sampled_from([-(2**31), 2**31 - 1, 0])
    seqused = path.supports("forward", features={"varlen", "seqused"})
    direction = "backward" if path.supports("backward", features={"varlen"}) else "forward"

    @hypothesis.given(data=st.data(), seed=st.integers(0, 2**32 - 1), causal=st.booleans())
    def holds(data: st.DataObject, seed: int, causal: bool) -> None:
        rng = torch.Generator().manual_seed(seed)
        case = Case(lengths_q=(40, 30, 50), lengths_k=(60, 0, 70), heads=(2, 1), varlen=True, causal=causal)
        inputs = make_inputs(case, path.device, rng)
        for name, count in (("cu_seqlens_q", 4), ("cu_seqlens_k", 4), ("seqused_q", 3), ("seqused_k", 3)):
            if count == 4 or (seqused and data.draw(st.booleans())):
                values = data.draw(st.lists(numbers, min_size=count, max_size=count))
                inputs.keywords[name] = torch.tensor(values, dtype=torch.int32, device=path.device)
        run(inputs, direction)
        guarded_outputs.check_surroundings()
        guarded_outputs.forget()

    holds()


@pytest.mark.needs("varlen")
@pytest.mark.timeout(600)
def test_packing_changes_no_number(path: Path) -> None:
    """Sequences packed with any slack between the tensors' ends equal the same sequences in a padded batch."""

    @hypothesis.given(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def holds(data: st.DataObject, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        drawn = data.draw(st.lists(st.tuples(lengths(path), lengths(path)), min_size=1, max_size=4))
        lengths_q, lengths_k = (tuple(min(pair[side], 200) for pair in drawn) for side in range(2))
        case = Case(
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            heads=(2, 1),
            varlen=True,
            causal=data.draw(st.booleans()),
            slack=(data.draw(st.integers(0, 200)), 0, data.draw(st.integers(0, 200))),
        )
        inputs = make_inputs(case, path.device, rng)
        verify(inputs, run(inputs, "forward"), "forward")

    holds()
