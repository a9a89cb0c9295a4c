"""Contract on a real GPU: no synchronisation, CUDA graphs, streams, the cpu path on CUDA tensors."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path as FilePath
from typing import Any

import pytest
import torch
from helpers.accuracy import assert_same_bits
from helpers.cases import Case, Inputs, make_inputs
from helpers.check import Results, run, verify
from helpers.paths import Path

pytestmark = pytest.mark.gpu

ROOT = FilePath(__file__).resolve().parents[1]
DENSE = Case(lengths_q=(200, 200), lengths_k=(300, 300), heads=(4, 2), causal=True)
PACKED = Case(
    lengths_q=(200, 0, 130),
    lengths_k=(300, 65, 90),
    heads=(4, 2),
    causal=True,
    varlen=True,
    slack=(3, 20, 30),
    sinks=torch.float32,
)


def _run_script(script: str, **variables: str) -> str:
    """What a fresh Python process prints; its first CUDA work is the script's own."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def _cases(path: Path, direction: str) -> list[Case]:
    rich = DENSE.with_(softcap=5.0, alibi="batch", dropout_p=0.2)
    cases = [DENSE, PACKED, rich, DENSE.with_(deterministic=True), DENSE.with_(layouts=(("q", "dim_swapped"),))]
    return [case for case in cases if path.supports(direction, case.dtype, case.head_dims, case.features)]


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
def test_no_synchronisation(path: Path, rng: torch.Generator, direction: str) -> None:
    """No call waits for the device or reads from it, packing copies and workspaces included."""
    for case in _cases(path, direction):
        inputs = make_inputs(case, path.device, rng)
        run(inputs, direction)  # loads the library
        torch.cuda.set_sync_debug_mode("error")
        try:
            out, lse = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
            if direction == "backward":
                torch.ops.flash_ext.bwd(
                    inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse, **inputs.keywords
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def test_call_returns_before_the_device_is_done(path: Path, rng: torch.Generator) -> None:
    """A call on a stream that is held up returns at once: nothing behind torch's back waits either."""
    inputs = make_inputs(DENSE, path.device, rng)
    run(inputs, "forward")
    stream, gate = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)  # about a second
        torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
        gate.record()
    assert not gate.query(), "the call waited for the stream"
    gate.synchronize()


def _capture(inputs: Inputs, direction: str) -> tuple[torch.cuda.CUDAGraph, Results]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = torch.ops.flash_ext.fwd(inputs.q, inputs.k, inputs.v, **inputs.keywords)
        results = Results(out, lse)
        if direction == "backward":
            results = Results(
                out,
                lse,
                *torch.ops.flash_ext.bwd(
                    inputs.dout, inputs.dlse, inputs.q, inputs.k, inputs.v, out, lse, **inputs.keywords
                ),
            )
    return graph, results


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
def test_graph_replay(path: Path, rng: torch.Generator, direction: str) -> None:
    """A captured call replays with new values in the same buffers, many times: no scratch is left over from before."""
    for case in _cases(path, direction):
        inputs = make_inputs(case, path.device, rng)
        graph, results = _capture(inputs, direction)
        for _ in range(3):
            fresh = make_inputs(case, path.device, rng)
            for name in ("q", "k", "v", "dout", "dlse"):
                getattr(inputs, name).copy_(getattr(fresh, name))
            for name, value in fresh.keywords.items():
                if torch.is_tensor(value):
                    inputs.keywords[name].copy_(value)
            graph.replay()
            torch.cuda.synchronize()
            verify(inputs, results, direction)


@pytest.mark.needs("varlen", "seqused")
@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
@pytest.mark.parametrize("varlen", [False, True])
def test_graph_replay_with_other_lengths(path: Path, rng: torch.Generator, direction: str, varlen: bool) -> None:
    """Lengths are device data: replaying after they changed in place, shorter and longer, computes the new ones."""
    rows, keys = 400, 700
    lengths: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((100, 50, 7), (300, 1, 200)),
        ((0, 0, 0), (0, 0, 0)),
        ((200, 0, 130), (5, 600, 64)),
        ((1, 1, 1), (200, 200, 200)),
        ((400, 0, 0), (0, 0, 700)) if varlen else ((400, 400, 400), (700, 700, 700)),
    ]
    lead: tuple[int, ...] = () if varlen else (3,)
    buffers = {
        name: torch.zeros(lead + shape, dtype=torch.bfloat16, device=path.device)
        for name, shape in (("q", (rows, 4, 64)), ("k", (keys, 2, 64)), ("v", (keys, 2, 64)), ("dout", (rows, 4, 64)))
    }
    buffers["dlse"] = torch.zeros((*lead, 4, rows), device=path.device)
    names = ("cu_seqlens_q", "cu_seqlens_k") if varlen else ("seqused_q", "seqused_k")
    tensors = {name: torch.zeros(4 if varlen else 3, dtype=torch.int32, device=path.device) for name in names}
    captured: tuple[torch.cuda.CUDAGraph, Results] | None = None
    for lengths_q, lengths_k in lengths:
        case = Case(lengths_q=lengths_q, lengths_k=lengths_k, heads=(4, 2), varlen=varlen, causal=True)
        tail_q = rows - (sum(lengths_q) if varlen else max(lengths_q))
        tail_k = keys - (sum(lengths_k) if varlen else max(lengths_k))
        slack = (0, 0, max(tail_q, tail_k)) if varlen else (0, max(tail_q, tail_k) + 1, 0)
        inputs = make_inputs(case.with_(slack=slack), path.device, rng)
        axis = 0 if varlen else 1
        for name, extent in (("q", rows), ("k", keys), ("v", keys), ("dout", rows)):
            buffers[name].copy_(getattr(inputs, name).narrow(axis, 0, extent))
            setattr(inputs, name, buffers[name])
        assert inputs.dlse is not None
        buffers["dlse"].copy_(inputs.dlse[..., :rows])
        inputs.dlse = buffers["dlse"]
        inputs.slack_q, inputs.slack_k = inputs.slack_q.narrow(-1, 0, rows), inputs.slack_k.narrow(-1, 0, keys)
        for name, tensor in tensors.items():
            tensor.copy_(inputs.keywords[name])
        inputs.keywords = {**inputs.keywords, **tensors, "max_seqlen_q": None, "max_seqlen_k": None}
        captured = captured or _capture(inputs, direction)
        captured[0].replay()
        torch.cuda.synchronize()
        verify(inputs, captured[1], direction)


FIRST_CALL = """
    import torch, flash_ext
    q = torch.randn(2, 128, 4, 64, device="cuda").to(torch.bfloat16)
    dout = torch.randn_like(q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    backward = {backward}
    with torch.cuda.graph(graph):
        out, lse = torch.ops.flash_ext.fwd(q, q, q, causal=True)
        if backward:
            gradients = torch.ops.flash_ext.bwd(dout, None, q, q, q, out, lse, causal=True)
    graph.replay()
    torch.cuda.synchronize()
    expected, _ = torch.ops.flash_ext.fwd(q, q, q, causal=True)
    assert torch.equal(out, expected)
    assert not backward or all(x.isfinite().all() for x in gradients)
    print("captured")
"""


def test_first_call_can_be_captured(path: Path) -> None:
    """The first ever call of a process loads the library and its kernels while a stream is capturing."""
    backward = path.supports("backward", features={"causal"})
    assert _run_script(FIRST_CALL.format(backward=backward)) == "captured"


CHECK_WHILE_CAPTURING = """
    import warnings
    import torch, flash_ext
    q = torch.randn(10, 2, 64, device="cuda").to(torch.bfloat16)
    bad = torch.tensor([0, 7, 5], dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(2):
                torch.ops.flash_ext.fwd(q, q, q, cu_seqlens_q=bad, cu_seqlens_k=bad)
    ours = [w for w in caught if "FLASH_EXT_CHECK" in str(w.message)]
    assert len(ours) == 1, [str(w.message) for w in caught]
    print("warned")
"""


@pytest.mark.needs("varlen")
def test_check_variable_is_skipped_while_capturing(path: Path) -> None:
    """FLASH_EXT_CHECK=1 cannot read lengths under capture: one warning, no error."""
    assert _run_script(CHECK_WHILE_CAPTURING, FLASH_EXT_CHECK="1") == "warned"


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
def test_two_streams(path: Path, rng: torch.Generator, direction: str) -> None:
    """Calls on two streams at once share no scratch: each result is what it is alone."""
    for case in _cases(path, direction):
        case = case.with_(deterministic=True)
        if not path.supports(direction, case.dtype, case.head_dims, case.features):
            continue
        inputs = [make_inputs(case, path.device, rng) for _ in range(2)]
        expected = [run(x, direction) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        for _ in range(20):
            results: list[Any] = []
            for stream, x in zip(streams, inputs, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    out, lse = torch.ops.flash_ext.fwd(x.q, x.k, x.v, **x.keywords)
                    gradients: tuple[Any, ...] = ()
                    if direction == "backward":
                        gradients = torch.ops.flash_ext.bwd(x.dout, x.dlse, x.q, x.k, x.v, out, lse, **x.keywords)
                    results.append(Results(out, lse, *gradients))
            torch.cuda.synchronize()
            for got, other in zip(results, expected, strict=True):
                for name in ("out", "lse", "dq", "dk", "dv"):
                    if getattr(other, name) is not None:
                        assert_same_bits(name, getattr(got, name), getattr(other, name))


@pytest.mark.parametrize("direction", ["forward", pytest.param("backward", marks=pytest.mark.needs("backward"))])
def test_two_graphs(path: Path, rng: torch.Generator, direction: str) -> None:
    """Two captured calls replayed at once on two streams, again and again, give what each gives alone."""
    for case in _cases(path, direction):
        case = case.with_(deterministic=True)
        if not path.supports(direction, case.dtype, case.head_dims, case.features):
            continue
        inputs = [make_inputs(case, path.device, rng) for _ in range(2)]
        expected = [run(x, direction) for x in inputs]
        captured = [_capture(x, direction) for x in inputs]
        streams = [torch.cuda.Stream() for _ in inputs]
        for _ in range(20):
            for stream, (graph, results) in zip(streams, captured, strict=True):
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for tensor in (results.out, results.dq, results.dk, results.dv):
                        if tensor is not None:
                            tensor.fill_(math.nan)  # of the replay before
                    for _ in range(5):
                        graph.replay()
            torch.cuda.synchronize()
            for (_, got), other in zip(captured, expected, strict=True):
                for name in ("out", "lse", "dq", "dk", "dv"):
                    if getattr(other, name) is not None:
                        assert_same_bits(name, getattr(got, name), getattr(other, name))


def test_runs_on_the_current_stream(path: Path, rng: torch.Generator) -> None:
    """Work goes to torch's current stream: inputs written on it just before are seen."""
    inputs = make_inputs(DENSE, path.device, rng)
    expected = run(inputs, "forward")
    v = inputs.v.clone()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros_like(v)
        torch.cuda._sleep(100_000_000)
        late.copy_(v)
        out, _ = torch.ops.flash_ext.fwd(inputs.q, inputs.k, late, **inputs.keywords)
    torch.cuda.synchronize()
    assert_same_bits("out", out, expected.out)


def test_second_device(path: Path, rng: torch.Generator) -> None:
    """Tensors on another GPU than the current one run there and leave the current device alone."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    inputs = make_inputs(DENSE, path.device, rng)
    expected = run(inputs, "forward")
    before = torch.cuda.current_device()
    other = torch.device("cuda", (before + 1) % torch.cuda.device_count())
    out, lse = torch.ops.flash_ext.fwd(*(x.to(other) for x in (inputs.q, inputs.k, inputs.v)), **inputs.keywords)
    assert out.device == other and torch.cuda.current_device() == before
    assert_same_bits("out", out.to(path.device), expected.out)
    assert_same_bits("lse", lse.to(path.device), expected.lse)


CPU_PATH = """
    import torch, flash_ext
    generator = torch.Generator().manual_seed(5)
    q, k, v, dout = (torch.randn(2, 70, 4, 64, generator=generator).to(torch.bfloat16) for _ in range(4))
    results = []
    for device in ("cpu", "cuda"):
        assert flash_ext.explain(q.to(device), k.to(device), v.to(device)).path == "cpu"
        operands = [x.to(device) for x in (q, k, v)]
        out, lse = torch.ops.flash_ext.fwd(*operands, causal=True)
        gradients = torch.ops.flash_ext.bwd(dout.to(device), None, *operands, out, lse, causal=True)[:3]
        assert out.device.type == device
        results.append([x.float().cpu() for x in (out, lse, *gradients)])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    print("same")
"""


def test_cpu_path_on_cuda_tensors(path: Path) -> None:
    """FLASH_EXT_PATH=cpu is the PyTorch implementation on whatever device the tensors are on."""
    assert _run_script(CPU_PATH, FLASH_EXT_PATH="cpu") == "same"
