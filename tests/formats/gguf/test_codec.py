"""GGUF blocks in torch: every type bit for bit as `gguf.quants.dequantize`, NaN as NaN; rounding, rows, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from localq.files.gguf.block_types import BLOCK_TYPES, by_name
from localq.formats.gguf import codec
from localq.formats.samples import Random

TYPES = tuple(codec.UNPACK)
WITH_REFERENCE = tuple(type for type in TYPES if type != "Q1_0")
QUANTIZABLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]

# Byte offsets of the f16 numbers of a block; MXFP4, NVFP4 and IQ1_M have none.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "Q1_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# f16 bits: zeros, the least and the largest subnormal, the least normal, 1, the largest, infinity, NaN; both signs.
SPECIAL = [bits | sign for sign in (0, 0x8000) for bits in (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7E00, 0x7C01)]


def random_blocks(type: str, *shape: int, seed: int = 0) -> Tensor:
    return Random(seed, "cpu").codes(*shape, by_name(type).bytes)


def finite_blocks(type: str, *shape: int, seed: int = 0) -> Tensor:
    """Random blocks whose values are finite."""
    blocks = random_blocks(type, *shape, seed=seed)
    if type == "IQ1_M":
        blocks[..., 55] &= 0xBF
    if type == "MXFP4":
        blocks[..., 0] &= 0x7F
    for at in HALVES.get(type, ()):
        blocks[..., at + 1] &= 0xBF  # an exponent below 16
    return blocks


def reference(blocks: Tensor, type: str) -> Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType[type]))


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = torch.int32 if actual.dtype == torch.float32 else torch.int16
    actual = actual.cpu()
    same = actual.view(bits) == expected.view(bits)
    assert (same | (actual.isnan() & expected.isnan())).all()


def test_block_types_are_those_of_the_gguf_package():
    assert {number: (each.number, each.name, each.values, each.bytes) for number, each in BLOCK_TYPES.items()} == {
        int(kind): (int(kind), kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()
    }
    assert all(by_name(each.name) is each for each in BLOCK_TYPES.values())
    plain = {each.name for each in BLOCK_TYPES.values() if not each.is_quantized}
    assert plain == {"F32", "F16", "BF16", "I8", "I16", "I32", "I64", "F64"}
    with pytest.raises(ValueError, match="'Q9_9' is not a block type"):
        by_name("Q9_9")


def test_every_quantized_type_that_the_package_dequantizes_is_here():
    quantized = {each.name for each in BLOCK_TYPES.values() if each.is_quantized}
    assert quantized - set(TYPES) == {"Q8_1", "Q8_K"}
    for type in sorted(quantized - set(WITH_REFERENCE)):
        with pytest.raises(NotImplementedError):
            reference(random_blocks(type, 1), type)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("type", WITH_REFERENCE)
def test_random_bytes(type, device):
    for blocks in (random_blocks(type, 600), finite_blocks(type, 600, seed=1)):
        assert_same_bits(codec.dequantize_blocks(blocks.to(device), type), reference(blocks, type))


@pytest.mark.parametrize("type", TYPES)
def test_finite_blocks_are_finite(type):
    """The comparison of `test_random_bytes` is not one of NaN alone."""
    assert codec.dequantize_blocks(finite_blocks(type, 600, seed=1), type).isfinite().all()


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x0F, 0x55, 0x7F, 0x80, 0xAA, 0xF0, 0xFF])
@pytest.mark.parametrize("type", WITH_REFERENCE)
def test_blocks_of_one_byte(type, byte):
    blocks = torch.full((1, by_name(type).bytes), byte, dtype=torch.uint8)
    assert_same_bits(codec.dequantize_blocks(blocks, type), reference(blocks, type))


@pytest.mark.parametrize("type", [type for type in WITH_REFERENCE if type in HALVES])
def test_special_scales(type):
    """Every pair of special numbers, where a block has two scales."""
    pairs = torch.cartesian_prod(torch.tensor(SPECIAL), torch.tensor(SPECIAL))
    blocks = random_blocks(type, len(pairs))
    for column, at in enumerate(HALVES[type]):
        blocks[:, at], blocks[:, at + 1] = pairs[:, column] & 0xFF, pairs[:, column] >> 8
    assert_same_bits(codec.dequantize_blocks(blocks, type), reference(blocks, type))


@pytest.mark.parametrize(("type", "scales"), [("MXFP4", 1), ("NVFP4", 4)])
def test_every_scale_of_one_byte(type, scales):
    blocks = random_blocks(type, 256)
    blocks[:, :scales] = torch.arange(256).unsqueeze(1)
    assert_same_bits(codec.dequantize_blocks(blocks, type), reference(blocks, type))


def test_every_scale_of_iq1_m():
    """Its f16 bits are spread over four numbers."""
    blocks = random_blocks("IQ1_M", 2**16 // 7 + 1)
    bits = torch.arange(0, 2**16, 7)
    for place in range(4):
        blocks[:, 49 + 2 * place] &= 0x0F
        blocks[:, 49 + 2 * place] |= (((bits >> (4 * place)) & 15) << 4).to(torch.uint8)
    assert_same_bits(codec.dequantize_blocks(blocks, "IQ1_M"), reference(blocks, "IQ1_M"))


@pytest.mark.parametrize("type", QUANTIZABLE)
def test_blocks_that_the_package_made(type):
    weight = torch.randn(24, 1024, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    with np.errstate(all="ignore"):
        blocks = torch.from_numpy(quants.quantize(weight.numpy(), GGMLQuantizationType[type]))
    packed = codec.Packed(blocks, type)
    assert packed.shape == (24, 1024)
    weights = codec.dequantize(packed, torch.float32)
    assert_same_bits(weights, reference(blocks, type))
    assert (weights - weight).square().mean() < 0.7 * weight.square().mean()  # not a transposed or shifted matrix


def test_q1_0_by_hand():
    """The package has no reference: d where a bit is set, -d elsewhere."""
    blocks = torch.zeros(2, 18, dtype=torch.uint8)
    blocks[:, 1] = 0x3C  # 1.0
    blocks[0, 2], blocks[1, 17] = 0b101, 0x80
    expected = torch.full((2, 128), -1.0)
    expected[0, 0] = expected[0, 2] = expected[1, 127] = 1.0
    assert_same_bits(codec.dequantize_blocks(blocks, "Q1_0"), expected)


def test_q4_k_by_hand():
    """d 0.5, dmin 0.25; group 1 has scale 3 and minimum 2, group 4 scale 33 and minimum 48."""
    block = torch.zeros(144, dtype=torch.uint8)
    block[1], block[3] = 0x38, 0x34
    block[5], block[9] = 3, 2  # scale and minimum of group 1
    block[4], block[8], block[12] = 2 << 6, 3 << 6, 1  # of group 4: 2 * 16 + 1, 3 * 16 + 0
    block[16 + 7] = 0xE0  # value 32 + 7: code 14
    block[16 + 64 + 31] = 0x0F  # value 128 + 31: code 15
    expected = torch.zeros(256)
    expected[32:64], expected[128:160] = -0.5, -12.0
    expected[39], expected[159] = 14 * 1.5 - 0.5, 15 * 16.5 - 12.0
    assert torch.equal(codec.dequantize_blocks(block, "Q4_K"), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("type", TYPES)
def test_other_dtypes_are_rounded_once(type, dtype):
    blocks = random_blocks(type, 6, 4).flatten(1)
    packed = codec.Packed(blocks, type)
    assert_same_bits(codec.dequantize(packed, dtype), codec.dequantize(packed, torch.float32).to(dtype))


@pytest.mark.parametrize("type", TYPES)
def test_rows_in_pieces_are_those_of_the_whole(type, monkeypatch):
    blocks = finite_blocks(type, 13, 3)
    packed = codec.Packed(blocks.flatten(1), type)
    whole = codec.dequantize_blocks(blocks, type).flatten(1)
    assert packed.shape == tuple(whole.shape)
    assert_same_bits(codec.dequantize(packed, torch.float32), whole)
    monkeypatch.setattr(codec, "CHUNK_WEIGHTS", {"cpu": 2 * whole.shape[1] + 1})
    assert_same_bits(codec.dequantize(packed, torch.float32), whole)
    out = torch.empty(4, whole.shape[1])
    assert codec.dequantize_rows(packed, 5, out) is out
    assert_same_bits(out, whole[5:9])
    monkeypatch.setattr(codec, "CHUNK_WEIGHTS", {"cpu": 1})
    assert_same_bits(codec.dequantize(packed, torch.float32), whole)


@pytest.mark.parametrize("type", TYPES)
def test_strided_unaligned_and_empty_blocks(type):
    size = by_name(type).bytes
    blocks = finite_blocks(type, 6, 2)
    whole = codec.dequantize_blocks(blocks, type)
    assert_same_bits(codec.dequantize_blocks(blocks[::2], type), whole[::2])
    assert_same_bits(codec.dequantize_blocks(blocks[3, 1], type), whole[3, 1])
    odd = torch.empty(1 + blocks.numel(), dtype=torch.uint8)[1:].view(blocks.shape).copy_(blocks)
    assert_same_bits(codec.dequantize_blocks(odd, type), whole)
    assert codec.dequantize_blocks(blocks[:0], type).shape == (0, 2, by_name(type).values)
    empty = codec.Packed(torch.empty(0, 2 * size, dtype=torch.uint8), type)
    assert codec.dequantize(empty, torch.float16).shape == (0, 2 * by_name(type).values)


def test_the_definition_leaves_the_blocks_alone():
    for type in TYPES:
        blocks = random_blocks(type, 3)
        before = blocks.clone()
        codec.dequantize_blocks(blocks, type)
        assert torch.equal(blocks, before), type


@pytest.mark.parametrize("type", TYPES)
def test_no_step_waits_for_values(type):
    """On the meta device a step that reads a value on the host raises: on a GPU it is a synchronization."""
    kind = by_name(type)
    packed = codec.Packed(torch.empty(3, 2 * kind.bytes, dtype=torch.uint8, device="meta"), type)
    assert codec.dequantize(packed, torch.float16).shape == (3, 2 * kind.values)


def test_packed_moves_and_is_placed():
    packed = codec.Packed(random_blocks("Q4_K", 2, 3).flatten(1), "Q4_K")
    arena = torch.zeros(packed.nbytes, dtype=torch.uint8)
    placed = packed.placed(lambda tensor: arena.view(tensor.shape).copy_(tensor), torch.device("cpu"))
    assert placed.blocks.data_ptr() == arena.data_ptr()
    assert (placed.type, placed.shape) == ("Q4_K", (2, 768))
    assert torch.equal(placed.blocks, packed.blocks)
    assert packed.to("cpu").type == "Q4_K"


@pytest.mark.parametrize(
    ("blocks", "type", "message"),
    [
        (torch.zeros(2, 18, dtype=torch.uint8), "Q8_K", "type 'Q8_K' is not one of Q4_0"),
        (torch.zeros(2, 18, dtype=torch.uint8), "F16", "type 'F16'"),
        (torch.zeros(2, 18, dtype=torch.int8), "Q4_0", "blocks have dtype torch.int8"),
        (torch.zeros(2, 17, dtype=torch.uint8), "Q4_0", r"blocks have shape \(2, 17\)"),
        (torch.zeros(0, dtype=torch.uint8), "Q4_0", "blocks have shape"),
    ],
)
def test_wrong_blocks_are_named(blocks, type, message):
    with pytest.raises(ValueError, match=message):
        codec.dequantize_blocks(blocks, type)
    with pytest.raises(ValueError, match=message):
        codec.Packed(blocks, type)


def test_wrong_rows_are_named():
    packed = codec.Packed(torch.zeros(4, 36, dtype=torch.uint8), "Q4_0")
    with pytest.raises(ValueError, match=r"out has shape \(1, 32\), must be \[count, 64\]"):
        codec.dequantize_rows(packed, 0, torch.empty(1, 32))
    for first in (-1, 3):
        with pytest.raises(ValueError, match=f"first is {first}: rows"):
            codec.dequantize_rows(packed, first, torch.empty(2, 64))
    with pytest.raises(ValueError, match="blocks have shape"):
        codec.Packed(torch.zeros(4, 0, dtype=torch.uint8), "Q4_0")
