"""delta_decode and delta_prefill on a GPU, where blocks run at the same time: against fp64, as a graph, and twice the
same bits; passes of many tokens against steps, and through the layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.engine.selftest import delta_nets
from localq.files import delta_memory
from localq.kernels import delta_net, embed
from localq.kernels.gemv import Norm
from localq.models.gated_delta_net import DeltaShape, GatedDeltaNet
from localq.models.layers import LayerState, empty_state
from tests.support.kernels.delta_emulation import HALF, assert_token_as_in_fp64

SHAPES = [(1, 1), (4, 8), (16, 1), (16, 2), (16, 3)]  # key heads, and value heads for each
CUDA = torch.device("cuda")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
def test_it_gives_what_fp64_gives(dtype, key_heads, shared):
    for hidden, seed in ((8, 0), (5120, 1), (6152, 2)):
        case = delta_nets.draw_step(key_heads, shared, dtype, CUDA, seed, hidden)
        workspace = case.workspace()
        for _ in range(5):
            assert_token_as_in_fp64(case, workspace, dtype)


@pytest.mark.cuda
def test_a_graph_gives_the_bits_of_launches():
    """Steps that begin as those of a model do, with a launch that waits for all before it (csrc/common/launch.h)."""
    cases = [delta_nets.draw_step(16, 3, torch.bfloat16, CUDA) for _ in range(2)]
    workspace, out = cases[0].workspace(), torch.empty_like(cases[0].token.gates)
    table, id = torch.randn(3, 320, device=CUDA).bfloat16(), torch.ones(1, dtype=torch.int64, device=CUDA)

    def step(case, out):
        embed.embed(id, table, out=case.x)
        return case.run(workspace, out)

    before = cases[0].token.matrix.clone(), cases[0].token.columns.clone()
    step(cases[0], out)  # kernels load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(cases[0], out)
    cases[0].token.matrix.copy_(before[0])
    cases[0].token.columns.copy_(before[1])
    differing = torch.zeros(1, dtype=torch.int64, device=CUDA)
    expected = torch.empty_like(out)
    for _ in range(200):
        graph.replay()
        differing += (out != step(cases[1], expected)).sum()
    assert int(differing) == 0
    assert torch.equal(cases[0].token.matrix, cases[1].token.matrix)
    assert torch.equal(cases[0].token.columns, cases[1].token.columns)


# ---- passes of many tokens


def _compare(what, found, expected, roundings, dtype, scale=1.0):
    """Fail with the tensor's name, the worst place, and how far off it is, in roundings of `dtype`."""
    found, expected = found.double(), expected.double()
    error = (found - expected).abs() / (HALF[dtype] * (expected.abs() + scale))
    worst = int(error.nan_to_num(torch.inf).argmax())
    place = tuple(int(each) for each in torch.unravel_index(torch.tensor(worst), error.shape))
    text = (
        f"{what} {tuple(found.shape)} {dtype}: {float(error.flatten()[worst]):.3g} roundings off at {place}, "
        f"{float(found.flatten()[worst])!r} instead of {float(expected.flatten()[worst])!r}; "
        f"{int((~(error <= roundings)).sum())} of {error.numel()} are off by more than {roundings}, "
        f"{int(found.isnan().sum())} are no numbers, root of the mean square {float(error.square().mean().sqrt()):.3g}"
    )
    assert bool((error <= roundings).all()), text


def _scaled(case, rates, write):
    case.weights.rates.mul_(rates)
    if write is not None:
        case.write.fill_(write)
    return case


def _parts(case, span):
    return {name: getattr(case, name)[span] for name in ("inputs", "gates", "write", "decay")}


def _against_fp64(case, dtype, chunks=None):
    heads, key_heads = case.weights.value_heads, case.weights.key_heads
    out, columns, matrix = delta_nets.expected(case)
    workspace = None
    if chunks is not None:
        size = chunks * delta_memory.chunk_bytes(key_heads, heads // key_heads)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=CUDA)  # not a number
    found = case.prefill(workspace)
    _compare("columns", case.columns, columns, 0, dtype)
    # Operands in f16 are as small as 2^-25, whatever the state is.
    _compare("state", case.matrix, matrix, 1 if dtype == torch.float16 else 0.25, dtype, max(matrix.abs().max(), 0.01))
    _compare("out", found, out, 4, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 130, 1000, 2048])
def test_a_pass_gives_what_fp64_gives(dtype, tokens):
    _against_fp64(delta_nets.draw(2, 3, dtype, CUDA, tokens=tokens), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize(("key_heads", "shared"), SHAPES)
def test_a_pass_of_every_shape_in_groups_of_chunks(dtype, key_heads, shared):
    for chunks in (1, 2, 3):
        _against_fp64(delta_nets.draw(key_heads, shared, dtype, CUDA, tokens=150), dtype, chunks)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rates", [0.0, 1e-3, 1.0, 50.0])
@pytest.mark.parametrize("write", [-12.0, 12.0, None])
def test_a_pass_with_decays_and_betas_of_any_size(dtype, rates, write):
    _against_fp64(_scaled(delta_nets.draw(2, 2, dtype, CUDA, seed=1, tokens=300), rates, write), dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_pass_of_tokens_that_are_alike(dtype):
    case = _scaled(delta_nets.draw(2, 2, dtype, CUDA, tokens=300), 0.0, 12.0)
    case.inputs.copy_(case.inputs[:1].expand_as(case.inputs))
    _against_fp64(case, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("lengths", [(64, 66), (1, 129), (63, 67), (512, 500)])
def test_passes_behind_each_other_are_one_pass(dtype, lengths):
    whole = delta_nets.draw(4, 3, dtype, CUDA, tokens=sum(lengths))
    columns, matrix = whole.columns.clone(), whole.matrix.clone()
    expected, first, found = whole.prefill(), 0, []
    for tokens in lengths:
        named = _parts(whole, slice(first, first + tokens))
        found.append(replace(whole, **named, columns=columns, matrix=matrix).prefill())
        first += tokens
    _compare("columns", columns, whole.columns, 0, dtype)
    exact = lengths[0] % 64 == 0
    _compare("state", matrix, whole.matrix, 0 if exact else 1, dtype, float(whole.matrix.abs().max()))
    _compare("out", torch.cat(found), expected, 0 if exact else 4, dtype)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_a_pass_is_its_tokens_one_by_one(dtype):
    """The matrices of a step pick b and a, rounded as those of the pass, from the weight of the norm."""
    case = delta_nets.draw(16, 3, dtype, CUDA, tokens=100)
    columns, matrix, picked, rows = case.columns.clone(), case.matrix.clone(), torch.eye(96, device=CUDA).to(dtype), []
    workspace = delta_net.DeltaWorkspace(16, 48, CUDA)
    for at in range(100):
        token = replace(case, **_parts(case, slice(at, at + 1)), columns=columns, matrix=matrix)
        norm = Norm(torch.cat((token.write, token.decay), 1)[0].float(), 0.0)
        step = delta_nets.StepCase(token, torch.ones_like(picked[:1]), norm, picked[:48], picked[48:])
        rows.append(step.run(workspace))
    found = case.prefill()
    _compare("columns", case.columns, columns, 0, dtype)
    _compare("state", case.matrix, matrix, 1, dtype, float(matrix.abs().max()))
    _compare("out", found, torch.cat(rows), 8, dtype)  # a step does not round beta: up to 3 of these


@pytest.mark.cuda
def test_a_pass_twice_and_as_a_graph_gives_the_same_bits():
    cases = [delta_nets.draw(16, 3, torch.bfloat16, CUDA, tokens=300) for _ in range(2)]
    out, size = torch.empty_like(cases[0].gates), delta_memory.kernel_bytes(300, 16, 3)
    workspace = torch.empty(size, dtype=torch.uint8, device=CUDA)
    before = cases[0].matrix.clone(), cases[0].columns.clone()
    cases[0].prefill(workspace, out)  # kernels load
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cases[0].prefill(workspace, out)
    cases[0].matrix.copy_(before[0])
    cases[0].columns.copy_(before[1])
    for _ in range(20):
        graph.replay()
        expected = cases[1].prefill()
        _compare("out", out, expected, 0, torch.bfloat16)
    _compare("state", cases[0].matrix, cases[1].matrix, 0, torch.bfloat16)
    _compare("columns", cases[0].columns, cases[1].columns, 0, torch.bfloat16)


class _Cache:
    """Of one layer."""

    def __init__(self, state: LayerState) -> None:
        self._state = state

    def state(self, layer: int) -> LayerState:
        return self._state

    def drafted(self, layer: int) -> None:
        return None


class _Pass:
    def __init__(self, state: LayerState) -> None:
        self.cache = _Cache(state)


def _layer(dtype, shared):
    generator = torch.Generator(CUDA).manual_seed(0)
    with torch.device(CUDA):
        net = GatedDeltaNet(DeltaShape(4, 4 * shared, 128, 128, 4), 256, 0, 1e-6).requires_grad_(False).to(dtype)
    for part in net.parameters():
        scale = part.shape[1] ** -0.5 if part.dim() == 2 else 0.5
        part.copy_(torch.randn(part.shape, generator=generator, device=CUDA) * scale)
    net.norm.weight.fill_(1.0)
    return net


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shared", [1, 3])
def test_the_layer_runs_the_kernels_and_gives_what_torch_gives(dtype, shared, monkeypatch):
    net = _layer(dtype, shared)
    states = [empty_state(net.shape.cache, dtype, CUDA) for _ in range(2)]
    with torch.inference_mode():
        for tokens in (70, 2, 130):
            x = torch.randn(tokens, 256, device=CUDA, generator=torch.Generator(CUDA).manual_seed(tokens)).to(dtype)
            assert net.has_kernel(x)
            found = net(x, _Pass(states[0]))
            with monkeypatch.context() as patch:
                patch.setattr(DeltaShape, "why_no_kernel", lambda _: "torch is wanted")
                assert not net.has_kernel(x)
                expected = net(x, _Pass(states[1]))
            _compare("columns", states[0].columns, states[1].columns, 0, dtype)
            matrix = states[1].matrix
            _compare("state", states[0].matrix, matrix, 2, dtype, float(matrix.abs().max()))
            _compare("out", found, expected, 16, dtype, float(expected.abs().max()) / 4)


@pytest.mark.cuda
def test_the_workspace_is_all_that_a_pass_allocates():
    case = delta_nets.draw(16, 3, torch.float16, CUDA, tokens=1024)
    out = torch.empty_like(case.gates)
    case.prefill(out=out)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    case.prefill(out=out)
    torch.cuda.synchronize()
    held = torch.cuda.max_memory_allocated() - before
    planned = delta_memory.kernel_bytes(1024, 16, 3)
    assert planned <= held < planned + 2**20, f"{held} bytes held, {planned} planned"
