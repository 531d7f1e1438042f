"""rmsnorm on a GPU: the modules' own rounding, any number of rows, in place, as a graph."""

from __future__ import annotations

import pytest
import torch

from localq.kernels.gemv import Norm
from localq.kernels.rmsnorm import rmsnorm, rmsnorm_bytes
from localq.models.layers import OffsetRMSNorm, RMSNorm

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 8), (1, 2304), (3, 5376), (7, 1032), (2, 40960)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal values with one outlier per row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[..., shape[-1] // 3] *= 60
    return x.to(dtype).cuda()


def norm_of(width: int, dtype: torch.dtype, offset: bool) -> tuple[Norm, RMSNorm]:
    module = (OffsetRMSNorm if offset else RMSNorm)(width, 1e-6)
    module.weight.data = 1 + 0.2 * torch.randn(width, generator=torch.Generator().manual_seed(width))
    module = module.to("cuda", dtype)
    module.finish()
    return Norm(module.factor.detach(), module.eps), module


def exact(x: torch.Tensor, norm: Norm, residual: torch.Tensor | None) -> torch.Tensor:
    """f64, nothing rounded."""
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return normed if residual is None else residual.double() + normed


@pytest.mark.cuda
@pytest.mark.parametrize("offset", [False, True], ids=["plain", "offset"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_as_close_as_the_module(shape, dtype, offset):
    norm, module = norm_of(shape[1], dtype, offset)
    x, residual = values(shape, dtype, 1), values(shape, dtype, 2)
    for added in (None, residual):
        expected = exact(x, norm, added)
        reference = module(x) if added is None else added + module(x)
        out = torch.full_like(x, torch.nan)
        assert rmsnorm(x, norm, residual=added, out=out) is out
        naive_error = (reference.double() - expected).abs().max()
        assert (out.double() - expected).abs().max() <= 2 * naive_error + 1e-6 * expected.abs().max()


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place_and_twice_the_same_bits(dtype):
    norm, _ = norm_of(3080, dtype, offset=True)
    x, residual = values((2, 3080), dtype, 3), values((2, 3080), dtype, 4)
    expected = rmsnorm(x, norm, residual=residual)
    assert torch.equal(rmsnorm(x, norm, residual=residual), expected)
    stream = residual.clone()
    assert rmsnorm(x, norm, residual=stream, out=stream) is stream
    assert torch.equal(stream, expected)
    assert torch.equal(rmsnorm(x.clone(), norm, residual=residual, out=x), expected)


@pytest.mark.cuda
def test_a_captured_graph_reads_what_is_there_at_replay():
    norm, _ = norm_of(1024, torch.float16, offset=False)
    x, later = values((1, 1024), torch.float16, 5), values((1, 1024), torch.float16, 6)
    expected, out = rmsnorm(later, norm), torch.empty_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rmsnorm(x, norm, out=out)
    x.copy_(later)
    graph.replay()
    assert torch.equal(out, expected)


def test_wrong_arguments_are_named():
    x, weight = torch.ones(2, 16, dtype=torch.float16), torch.ones(16, dtype=torch.float16)
    norm = Norm(weight, 1e-5)
    with pytest.raises(ValueError, match=r"x has shape \(16,\), must be \[rows, width\]"):
        rmsnorm(x[0], norm)
    with pytest.raises(ValueError, match=r"norm weight has shape \(8,\), must have 16"):
        rmsnorm(x, Norm(weight[:8], 1e-5))
    with pytest.raises(ValueError, match=r"x is torch.float32"):
        rmsnorm(x.float(), norm)
    with pytest.raises(ValueError, match=r"residual has strides"):
        rmsnorm(x, norm, residual=torch.ones(16, 2, dtype=torch.float16).T)
    with pytest.raises(ValueError, match=r"out is torch.bfloat16"):
        rmsnorm(x, norm, out=x.bfloat16())
    with pytest.raises(ValueError, match=r"x are on cpu, must be on a CUDA device"):
        rmsnorm(x, norm)


@pytest.mark.cuda
def test_a_width_that_is_not_whole_is_refused():
    x = torch.ones(1, 12, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match=r"width = 12, must be a positive multiple of 8"):
        rmsnorm(x, Norm(x[0], 1e-5))


def test_bytes_are_those_of_the_tensors():
    x, weight = torch.ones(3, 24, dtype=torch.bfloat16), torch.ones(24)
    assert rmsnorm_bytes(3, 24, residual=True, offset=True) == 3 * x.nbytes + weight.nbytes
    assert rmsnorm_bytes(3, 24) == 2 * x.nbytes + weight.bfloat16().nbytes
