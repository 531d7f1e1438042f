"""vq2 against matrices worked by hand, against its page term by term; its bytes, and the module."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn import functional as F

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts, schemes
from localq.formats.codebooks import aqlm, rotation, vq2, vq2_codec
from localq.formats.codebooks.vq2 import Packed
from localq.planner import footprint
from tests.support.engine.live_memory import LiveMemory
from tests.support.formats.vq2_checkpoints import SCHEMES, decoded, exact, packed_of

SHAPE = (67, 160)  # five blocks of 32
Q = "model.layers.3.self_attn.q_proj"

# ---- by hand


def test_overlap_by_hand():
    codebook = torch.zeros(256, 16)
    codebook[3], codebook[200] = torch.arange(1.0, 17), 100 * torch.arange(1.0, 17)
    codes = torch.tensor([[3, 200], [200, 3]], dtype=torch.uint8)  # a stride of 8: the second is cut after 8 weights
    packed = Packed(((codes, codebook.half()),), torch.tensor([2.0, 0.5]).half(), None, (2, 16))
    low, high = [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]
    first = [2 * each for each in low] + [2 * (a + 100 * b) for a, b in zip(high, low, strict=True)]
    second = [50 * each for each in low] + [0.5 * (100 * a + b) for a, b in zip(high, low, strict=True)]
    assert vq2.dequantize(packed, torch.float32).tolist() == [first, second]


def test_two_books_and_signs_by_hand():
    """decoded is 3 * e0 in the first row and 8 * e1 in the second: rows of H, a quarter each, with the signs."""
    main, other = torch.zeros(256, 4), torch.zeros(256, 16)
    main[1, 0], main[2, 1], other[9, 0], other[9, 1] = 1.0, 2.0, 2.0, 0.0
    codes = torch.tensor([[1, 0, 0, 0], [2, 0, 0, 0]], dtype=torch.uint8)
    second = torch.tensor([[9], [0]], dtype=torch.uint8)
    scales, signs = torch.tensor([1.0, 4.0]).half(), torch.tensor([0b0000_0010, 0b1000_0000], dtype=torch.uint8)
    packed = Packed(((codes, main.half()), (second, other.half())), scales, signs, (2, 16))
    sign = torch.ones(16)
    sign[[1, 15]] = -1
    weight = vq2.dequantize(packed, torch.float32)
    assert torch.equal(weight[0], 0.75 * sign)
    assert torch.equal(weight[1], 2.0 * torch.tensor([1.0, -1.0] * 8) * sign)


def test_the_sum_is_not_rounded_before_the_scale():
    """2048 + 1 is no f16 number; times 1.5 it is 3073.5, and that rounds to 3074."""
    book = (torch.zeros(1, 1, dtype=torch.uint8), torch.full((256, 16), 2048.0).half())
    other = (torch.zeros(1, 1, dtype=torch.uint8), torch.ones(256, 16).half())
    packed = Packed((book, other), torch.tensor([1.5]).half(), None, (1, 16))
    assert vq2.dequantize(packed, torch.float32).unique().item() == 3073.5
    assert vq2.dequantize(packed, torch.float16).unique().item() == 3074.0


# ---- against the page


@pytest.mark.parametrize("scheme", SCHEMES)
def test_decoding_is_the_sum_of_its_terms_bit_for_bit(scheme):
    packed = packed_of(SHAPE, scheme, signs=False)
    assert torch.equal(vq2.dequantize(packed, torch.float32), decoded(packed))
    rotated = packed_of(SHAPE, scheme, signs=True)
    rows = vq2.decode_rows(rotated, 5, torch.empty(31, SHAPE[1]))
    assert torch.equal(rows, decoded(rotated)[5:36])


@pytest.mark.parametrize("columns", [16, 160, 576, 1536, 8192])
def test_with_signs_it_is_the_product_with_the_hadamard_matrices(columns):
    """One rounding a stage of the butterflies, one for the norm; signs are exact."""
    packed = packed_of((9, columns), "s4l16+s8l32")
    wanted = exact(packed)
    bound = (rotation.block_of(columns).bit_length() + 2) * 2**-24 * wanted.norm(dim=1)
    error = vq2.dequantize(packed, torch.float32).double() - wanted
    assert (error.norm(dim=1) <= bound).all()


@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
def test_it_is_rounded_once(signs):
    packed = packed_of(SHAPE, signs=signs)
    whole = vq2.dequantize(packed, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(vq2.dequantize(packed, dtype), whole.to(dtype))


@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
def test_chunks_change_nothing(monkeypatch, signs):
    packed = packed_of(SHAPE, "s4l16+s16l16", signs)
    whole = vq2.dequantize(packed, torch.float16)
    monkeypatch.setattr(vq2_codec, "CHUNK_WEIGHTS", {"cpu": 10 * SHAPE[1] + 3})
    assert torch.equal(vq2.dequantize(packed, torch.float16), whole)


def test_aqlm_s_small_books_are_members():
    """One codebook of 256 with groups of 8: the sums are the same numbers, AQLM rounds them in between."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (5, 4), generator=generator, dtype=torch.uint8)
    codebook = torch.randint(-8, 8, (256, 8), generator=generator).half()
    scales = torch.tensor([0.5, 1.0, 2.0, 4.0, 0.25]).half()
    theirs = aqlm.Packed(codes.view(torch.int8)[..., None], codebook.view(1, 256, 1, 8), scales.view(5, 1, 1, 1))
    ours = Packed(((codes, codebook),), scales, None, (5, 32))
    assert torch.equal(vq2.dequantize(ours, torch.float16), aqlm.dequantize(theirs, torch.float16))


def on_meta(shape: tuple[int, int], scheme: str) -> Packed:
    out, columns = shape
    books = tuple(
        (
            torch.empty(out, columns // stride, dtype=torch.uint8, device="meta"),
            torch.empty(256, length, dtype=torch.float16, device="meta"),
        )
        for stride, length in schemes.vq2_codebooks(scheme)
    )
    signs = torch.empty(columns // 8, dtype=torch.uint8, device="meta")
    return Packed(books, torch.empty(out, dtype=torch.float16, device="meta"), signs, shape)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_temporaries_are_those_that_are_planned(monkeypatch, scheme):
    packed = on_meta((28_672, 8192), scheme)
    monkeypatch.setattr(vq2_codec, "CHUNK_WEIGHTS", {"meta": vq2_codec.CHUNK_WEIGHTS["cuda"]})
    monkeypatch.setattr(rotation, "CHUNK_VALUES", {"meta": rotation.CHUNK_VALUES["cuda"]})
    with LiveMemory() as memory:
        weight = vq2.dequantize(packed, torch.float16)
    assert 0 < memory.peak - weight.nbytes <= format_facts.FORMATS["vq2"].unpack_bytes
    x = torch.empty(footprint.PREFILL_CHUNK, 28_672, dtype=torch.float16, device="meta")
    with LiveMemory() as memory:
        rotated = rotation.rotate(x, torch.empty(28_672 // 8, dtype=torch.uint8, device="meta"))
    assert 0 < memory.peak - rotated.nbytes <= format_facts.FORMATS["vq2"].unpack_bytes


# ---- bytes


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_counted(scheme):
    packed = packed_of(SHAPE, scheme)
    tensors = vq2.to_tensors(packed, Q)
    assert vq2.bytes(*SHAPE, scheme) == packed.nbytes == sum(each.nbytes for each in tensors.values())
    assert vq2.bits_per_weight([packed]) == 8 * packed.nbytes / (67 * 160)
    described = {Q + suffix: part for suffix, part in vq2.layout(*SHAPE, scheme).items()}
    assert described == {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    kept = vq2.layout(*SHAPE, scheme, signs=False, codebooks=False)
    assert [suffix for suffix in vq2.layout(*SHAPE, scheme) if suffix not in kept] == [
        suffix for suffix in (".codebook", ".codebook_2", ".signs") if Q + suffix in tensors
    ]


def test_a_codebook_in_common_counts_once():
    first, second = packed_of(SHAPE), packed_of((33, 160), seed=1)
    shared = Packed(((second.books[0][0], first.books[0][1]),), second.scales, None, second.shape)
    total = first.nbytes + shared.nbytes - 2 * 256 * 16
    assert vq2.bits_per_weight([first, shared]) == 8 * total / (100 * 160)
    assert vq2.bits_per_weight(iter([first, second])) == 8 * (first.nbytes + second.nbytes) / (100 * 160)


def test_bits_per_weight_of_a_large_matrix():
    count = 28_672 * 8192
    for scheme, bits in (("", 2), ("s4l16+s16l16", 2.5), ("s4l16+s8l16", 3), ("s4l16+s4l16", 4), ("s8l8", 1)):
        assert 8 * vq2.bytes(28_672, 8192, scheme) / count == pytest.approx(bits, abs=0.004)


@pytest.mark.parametrize("scheme", ["s3l16", "s4l15", "s8l4", "s4l36", "s4", "s4l16+", "s4l16+s4l16+s4l16", "2x8"])
def test_what_is_no_scheme_is_refused(scheme):
    with pytest.raises(LocalqError, match="not a valid vq2 scheme") as caught:
        vq2.bytes(64, 64, scheme)
    assert caught.value.exit_code == ExitCode.USAGE


# ---- the module


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("scheme", ["s4l16", "s4l16+s8l32"])
def test_linear(scheme, signs, bias):
    packed = packed_of(SHAPE, scheme, signs)
    added = torch.randn(SHAPE[0]) if bias else None
    linear, x = vq2.Linear(packed, added), torch.randn(5, SHAPE[1])
    wanted = F.linear(x.double(), exact(packed), None if added is None else added.double())
    naive = (F.linear(x, vq2.dequantize(packed, torch.float32), added).double() - wanted).abs().max()
    assert (linear(x).double() - wanted).abs().max() <= 2 * naive + 1e-6 * wanted.abs().max()
    assert torch.equal(linear.tile_()(x), linear(x))
    assert not list(linear.parameters())  # frozen: buffers only
    assert sum(each.nbytes for each in linear.buffers()) == packed.nbytes + (added.nbytes if bias else 0)
    assert linear.shape == SHAPE
    assert torch.equal(vq2.dequantize(linear.packed, torch.float32), vq2.dequantize(packed, torch.float32))


@pytest.mark.parametrize("rows", [0, 1, 7, 40, SHAPE[0]])
@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
def test_slabs_give_the_whole_product(rows, signs):
    """A scratch for so many rows; 0: not even for one, which then takes memory of its own."""
    linear, x = vq2.Linear(packed_of(SHAPE, "s4l16+s16l16", signs), torch.randn(SHAPE[0])), torch.randn(5, SHAPE[1])
    expected = linear(x)
    linear.scratch = torch.full((max(rows * SHAPE[1] * 4, 1),), 255, dtype=torch.uint8)
    assert linear.slab_rows(torch.float32) == max(rows, 1)
    torch.testing.assert_close(linear(x), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_the_gpu(scheme, signs):
    packed = packed_of((323, 1088), scheme, signs)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        weight = vq2.dequantize(packed, dtype)
        assert torch.equal(vq2.dequantize(packed.to("cuda"), dtype).cpu(), weight)
    linear = vq2.Linear(packed.to("cuda"))
    linear.scratch = torch.empty(100 * 1088 * 2, dtype=torch.uint8, device="cuda")
    x = torch.randn(9, 1088, dtype=torch.float16, device="cuda")
    wanted = x.double() @ exact(packed).cuda().T
    naive = (F.linear(x, vq2.dequantize(packed.to("cuda"), torch.float16)).double() - wanted).norm()
    # Turned x is rounded to f16 as the weights are: two errors of one size instead of one, before both are rounded.
    assert (linear(x).double() - wanted).norm() <= 2**0.5 * naive


def test_the_docstring_names_every_tensor():
    text = re.sub(r"\s+", " ", vq2.__doc__ or "")
    assert all(f"P{suffix}" in text or f"E{suffix}" in text for suffix in vq2.suffixes)
    assert "bits per weight" in text.lower()
