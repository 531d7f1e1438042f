"""4-bit formats: layouts worked by hand, dequantize against the projects' formula bit for bit, the packed form."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from localq.files import format_facts
from localq.files.linears import Linears
from localq.formats import FORMATS, owner
from localq.formats.int4 import awq, gptq
from localq.formats.int4 import codec as int4_codec
from tests.support.formats.int4_checkpoints import COMPRESSED, Int4, checkpoint_of, reference, tensors, words

KINDS = [
    *(Int4("awq", group) for group in (16, 32, 64, 128, -1)),
    *(Int4("gptq", group, act_order) for group in (32, 64, 128, -1) for act_order in (False, True)),
    Int4("gptq", 64, True, "gptq_v2"),
    Int4("gptq", 128, g_idx=False),
    *(Int4(COMPRESSED, group, symmetric=symmetric) for group in (32, 64, 128, -1) for symmetric in (False, True)),
    *(Int4(COMPRESSED, 64, act_order=True, symmetric=symmetric) for symmetric in (False, True)),
]  # fmt: skip
SOME = [Int4("awq", 64), *(Int4(method, 64, order) for method in ("gptq", COMPRESSED) for order in (True, False))]


def packed_of(made: Mapping[str, Tensor], of: Int4) -> int4_codec.Packed:
    return FORMATS[of.method].from_checkpoint(checkpoint_of(made, of.config), "P")


def test_awq_by_hand():
    """Two groups of 16 columns, 8 rows. Column 3 has code 1 in row 1 and code 9 in row 6; zero points are 8 and 2."""
    qweight = torch.zeros(32, 1, dtype=torch.int32)
    qweight[3, 0] = (1 << 16) + (9 << 12)  # nibble 4 is row 1, nibble 3 is row 6
    qzeros = torch.tensor([[8 << 16], [2 << 28]], dtype=torch.int32)  # row 1 of group 0; row 7 of group 1
    scales = torch.full((2, 8), 0.5, dtype=torch.float16)
    scales[1, 7] = 0.1
    made = {".qweight": qweight, ".qzeros": qzeros, ".scales": scales}
    weight = awq.dequantize(packed_of(made, Int4("awq", 16)), torch.float32)
    expected = torch.zeros(8, 32)
    expected[1, :16], expected[1, 3], expected[6, 3] = -4.0, -3.5, 4.5
    expected[7, 16:] = -0.199951171875  # 0.1 in f16 is 0.0999755859375
    assert torch.equal(weight, expected)


def test_gptq_by_hand():
    """Act-order: groups 0 and 1 have the even and the odd columns. Zero points are stored less 1."""
    qweight = torch.zeros(4, 8, dtype=torch.int32)
    qweight[0, 2] = 5 << 12  # column 3 of row 2
    qweight[3, 7] = words([0, 0, 0, 0, 0, 0, 15, 0])  # column 30 of row 7
    qzeros = torch.tensor([[words([7] * 8)], [words([1, 2, 3, 4, 5, 6, 7, 8])]], dtype=torch.int32)
    scales = torch.tensor([[1.0] * 8, [2.0] * 8], dtype=torch.float16)
    g_idx = torch.arange(32, dtype=torch.int32) % 2
    made = {".qweight": qweight, ".qzeros": qzeros, ".scales": scales, ".g_idx": g_idx}
    expected = torch.empty(8, 32)
    expected[:, 0::2] = -8.0
    expected[:, 1::2] = -2.0 * torch.arange(2.0, 10.0).view(8, 1)
    expected[2, 3], expected[7, 30] = 2.0 * (5 - 4), 7.0
    packed = packed_of(made, Int4("gptq", 16, True))
    assert torch.equal(gptq.dequantize(packed, torch.float32), expected)
    assert int4_codec.columns_of(packed.order).tolist() == [*range(0, 32, 2), *range(1, 32, 2)]
    newer = packed_of(made, Int4("gptq", 16, True, "gptq_v2"))
    assert torch.equal(gptq.dequantize(newer, torch.float32)[0], torch.tensor([-7.0, -2.0]).repeat(16))


def test_a_stored_15_carries_into_its_neighbour_as_in_gptqmodel():
    """Whole words are converted, so that 0 and 1, which GPTQModel stores as 15 and 15 (a borrow), come back."""
    made = tensors((8, 32), Int4("gptq", 32))
    made[".qzeros"] = torch.tensor([[words([0, 1, 2, 3, 0, 0, 9, 15]) - 0x11111111]]).to(torch.int32)
    packed = packed_of(made, Int4("gptq", 32))
    assert int4_codec.nibbles(packed.zeros).tolist() == [[0, 1, 2, 3, 0, 0, 9, 15]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("of", KINDS, ids=str)
def test_dequantize_is_the_projects_formula_bit_for_bit(of, dtype):
    made = tensors((48, 256), of, dtype, seed=3)
    packed, expected = packed_of(made, of), reference(made, of)
    assert expected.dtype == dtype
    assert torch.equal(FORMATS[of.method].dequantize(packed, dtype), expected)
    for other in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(FORMATS[of.method].dequantize(packed, other), expected.to(other))


def test_rounding_is_of_the_product_in_the_type_of_the_scales():
    """A product in f32 would differ: this is no test of numbers that are exact anyhow."""
    of = Int4("awq", 32)
    made = tensors((64, 128), of)
    exact = reference(made | {".scales": made[".scales"].float()}, of)
    assert not torch.equal(awq.dequantize(packed_of(made, of), torch.float32), exact)


def test_a_last_group_of_fewer_columns():
    of = Int4("gptq", 128, True)
    made = tensors((16, 192), of)
    assert made[".scales"].shape[0] == 2
    assert torch.equal(gptq.dequantize(packed_of(made, of), torch.float16), reference(made, of))


@pytest.mark.parametrize("of", SOME, ids=str)
def test_rows_in_parts_are_those_of_the_whole(of, monkeypatch):
    made = tensors((48, 128), of)
    packed, expected = packed_of(made, of), reference(made, of).float()
    monkeypatch.setattr(int4_codec, "CHUNK_WEIGHTS", {"cpu": 128 * 16})
    monkeypatch.setattr("localq.formats.int4.read.CHUNK_WEIGHTS", 128 * 16)
    assert torch.equal(int4_codec.dequantize(packed, torch.float32), expected)
    assert torch.equal(packed_of(made, of).codes, packed.codes)
    out = torch.empty(13, 128)
    assert torch.equal(int4_codec.dequantize_rows(packed, 8, out), expected[8:21])


@pytest.mark.parametrize("of", SOME, ids=str)
def test_the_linear_multiplies_in_slabs(of, monkeypatch):
    made = tensors((48, 128), of)
    weight, bias, x = reference(made, of).float(), torch.randn(48), torch.randn(5, 128)
    linear = FORMATS[of.method].Linear(packed_of(made, of), bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    assert torch.equal(linear(x), expected)
    linear.scratch = torch.empty(4 * 128 * 20, dtype=torch.uint8)
    assert linear.slab_rows(torch.float32) == 16
    torch.testing.assert_close(linear._by_slabs(x), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("of", KINDS, ids=str)
def test_a_gpu_dequantizes_the_same_bits(of, dtype):
    made = tensors((48, 256), of, dtype, seed=3)
    packed = packed_of(made, of).to("cuda")
    assert torch.equal(int4_codec.dequantize(packed, dtype).cpu(), reference(made, of))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_temporaries_on_a_gpu_stay_within_the_plan(dtype):
    groups, shape = 32, (4096, 4096)
    codes = torch.zeros(shape[0], shape[1] // 2, dtype=torch.uint8, device="cuda")
    scales = torch.ones(groups, shape[0], dtype=dtype, device="cuda")
    zeros = torch.zeros(groups, shape[0] // 2, dtype=torch.uint8, device="cuda")
    order = int4_codec.as_order(torch.arange(shape[1] - 1, -1, -1)).cuda()
    out = torch.empty(shape, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    int4_codec.dequantize_rows(int4_codec.Packed(codes, scales, zeros, order, 128, False), 0, out)
    assert torch.cuda.max_memory_allocated() - before <= format_facts.FORMATS["gptq"].unpack_bytes


@pytest.mark.parametrize("of", KINDS, ids=str)
def test_bytes(of):
    module, shape = FORMATS[of.method], (48, 256)
    made = tensors(shape, of)
    checkpoint, packed = checkpoint_of(made, of.config), packed_of(made, of)
    assert owner(checkpoint.tensors, f"P{module.suffixes[0]}") == (of.method, "P")
    assert module.stored_shape(checkpoint, "P") == packed.shape == shape
    assert module.stored_bytes(checkpoint.tensors, "P") == sum(each.nbytes for each in made.values())
    placed: list[int] = []
    packed.placed(lambda tensor: placed.append(tensor.nbytes) or tensor, torch.device("cpu"))
    assert module.placed_bytes(checkpoint.tensors, "P") == placed
    assert sum(placed) == packed.nbytes == packed.to("cpu").nbytes
    if of.g_idx and not (of.method == COMPRESSED and of.act_order):  # bytes are without an order
        scheme = "row" if of.group == -1 else f"g{of.group}"
        assert module.bytes(*shape, of.group) == packed.nbytes
        assert format_facts.matrix_bytes(Linears("P", *shape, 1), of.method, scheme) == packed.nbytes
