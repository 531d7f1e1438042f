"""embed on a GPU: the rows of the table bit for bit, from the device or from pinned host memory; torch's scaling."""

from __future__ import annotations

import pytest
import torch

from localq.kernels.embed import embed, embed_bytes

DTYPES = [torch.float16, torch.bfloat16]
SHAPES = [(1, 8), (51, 1032), (1003, 5376)]


def table_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 3).to(dtype)


def ids_of(vocab: int, rows: int) -> torch.Tensor:
    """The last id, the first, and some between."""
    ids = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(rows))
    ids[0] = vocab - 1
    ids[rows // 2] = 0
    return ids.cuda()


@pytest.mark.cuda
@pytest.mark.parametrize("pinned", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_come_out_bit_for_bit(shape, dtype, pinned):
    host = table_of(shape, dtype)
    table = host.pin_memory() if pinned else host.cuda()
    for rows in (1, 5, 300):
        ids = ids_of(shape[0], rows)
        out = torch.full((rows, shape[1]), torch.nan, dtype=dtype, device="cuda")
        assert embed(ids, table, out=out) is out
        assert torch.equal(out.cpu(), host[ids.cpu()])


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_scale_is_rounded_as_torch_rounds(dtype):
    table, ids = table_of((77, 2304), dtype).cuda(), ids_of(77, 9)
    scale = torch.tensor(2304**0.5).to(dtype).item()
    assert torch.equal(embed(ids, table, scale=scale), table[ids] * scale)


@pytest.mark.cuda
def test_a_captured_graph_reads_the_id_at_replay():
    table, ids = table_of((99, 512), torch.float16).pin_memory(), torch.tensor([3], device="cuda")
    out = torch.empty(1, 512, dtype=torch.float16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        embed(ids, table, out=out)
    for token in (98, 0, 41):
        ids.fill_(token)
        graph.replay()
        assert torch.equal(out.cpu()[0], table[token])


def test_wrong_arguments_are_named():
    table, ids = torch.ones(5, 16, dtype=torch.float16), torch.tensor([1])
    with pytest.raises(ValueError, match=r"table has shape \(16,\), must be \[vocab, hidden\]"):
        embed(ids, table[0])
    with pytest.raises(ValueError, match=r"ids is torch.int32"):
        embed(ids.int(), table)
    with pytest.raises(ValueError, match=r"ids are on cpu, must be on a CUDA device"):
        embed(ids, table)


@pytest.mark.cuda
def test_pageable_tables_and_other_types_are_refused():
    table, ids = torch.ones(5, 16, dtype=torch.float16), torch.tensor([1], device="cuda")
    with pytest.raises(ValueError, match=r"table is on cpu, must be on cuda:0"):
        embed(ids, table)
    with pytest.raises(ValueError, match=r"table is torch.float32"):
        embed(ids, table.float().cuda())
    with pytest.raises(ValueError, match=r"out has shape \(2, 16\), must have 16"):
        embed(ids, table.cuda(), out=torch.empty(2, 16, dtype=torch.float16, device="cuda"))
    with pytest.raises(ValueError, match=r"hidden = 12, must be a positive multiple of 8"):
        embed(ids, torch.ones(5, 12, dtype=torch.float16, device="cuda"))


def test_bytes_are_those_of_the_rows():
    row = torch.ones(3, 40, dtype=torch.float16)
    assert embed_bytes(3, 40) == 2 * row.nbytes + torch.ones(3, dtype=torch.int64).nbytes
