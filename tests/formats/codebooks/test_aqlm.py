"""AQLM against a matrix worked by hand, against the package aqlm, and against damaged checkpoints."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.files.linears import Linears
from localq.formats.codebooks import aqlm
from localq.formats.codebooks.aqlm import Packed
from tests.support.engine.live_memory import LiveMemory
from tests.support.formats import aqlm_package
from tests.support.formats.aqlm_checkpoints import LAYOUTS, Layout, tensors
from tests.support.formats.memory_checkpoint import Held

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
SHAPE = (66, 96)  # of every layout: whole groups of 4, 8, 16 and 32 columns, and of 2 rows


def packed_of(layout: Layout, dtype: torch.dtype = torch.float16, shape: tuple[int, int] = SHAPE) -> Packed:
    return Packed(*tensors(shape, layout, dtype, seed=shape[0]).values())


def of_package(packed: Packed) -> Tensor:
    return aqlm_package.dequantized(packed.codes, packed.codebooks, packed.scales)


# ---- by hand


def test_a_matrix_by_hand():
    books = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]).view(1, 4, 1, 2)
    books = torch.cat([books, books / 64 - 1])  # the second: -63/64 -62/64, -61/64 -60/64, -59/64 -58/64, -57/64 -56/64
    codes = torch.tensor([[[0, 3], [-1, -4]], [[2, 1], [-2, -3]], [[1, 0], [1, 2]]], dtype=torch.int8)  # -1 is 3
    scales = torch.tensor([2.0, 1.0, 64.0]).view(3, 1, 1, 1)
    packed = Packed(codes, books, scales)
    assert packed.shape == (3, 4)
    expected = [
        [2 * (1 - 57 / 64), 2 * (2 - 56 / 64), 2 * (7 - 63 / 64), 2 * (8 - 62 / 64)],
        [5 - 61 / 64, 6 - 60 / 64, 5 - 61 / 64, 6 - 60 / 64],
        [192.0 - 63, 256.0 - 62, 192.0 - 59, 256.0 - 58],
    ]
    assert aqlm.dequantize(packed, torch.float32).tolist() == expected


def test_the_sum_is_rounded_before_the_scale_by_hand():
    """2048 + 1 lies between two f16 numbers and goes to the even one, 2048; times 1.5 that is 3072, not 3073.5."""
    books = torch.tensor([2048.0, 1.0]).half().view(2, 1, 1, 1).repeat(1, 2, 1, 1)
    packed = Packed(torch.zeros(1, 1, 2, dtype=torch.int8), books, torch.full((1, 1, 1, 1), 1.5).half())
    for dtype in (torch.float16, torch.float32):
        assert aqlm.dequantize(packed, dtype).item() == 3072.0


def test_codewords_of_two_rows_by_hand():
    book = torch.arange(12.0).view(1, 2, 2, 3)  # codeword 0: rows 0 1 2 and 3 4 5
    packed = Packed(torch.tensor([[[1], [0]]], dtype=torch.int8), book, torch.ones(1, 1, 1, 1))
    assert aqlm.dequantize(packed, torch.float32).tolist() == [[6, 7, 8, 0, 1, 2], [9, 10, 11, 3, 4, 5]]


# ---- against the package


def bits_of(values: Tensor) -> Tensor:
    return values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantize_agrees_bit_for_bit(name, dtype):
    packed = packed_of(LAYOUTS[name], dtype)
    weight = aqlm.dequantize(packed, dtype)
    theirs = of_package(packed)
    if dtype == torch.bfloat16 and LAYOUTS[name].books > 1:  # torch's CPU library rounds ties of such sums up
        exact = of_package(Packed(packed.codes, packed.codebooks.float(), torch.ones_like(packed.scales)))
        scales = packed.scales.view(-1, 1).repeat_interleave(LAYOUTS[name].out_group, 0)
        tie = exact.view(torch.int32) & 0xFFFF == 0x8000
        assert not ((weight != theirs) & ~tie).any()
        theirs = exact.bfloat16() * scales  # where nothing but ties differs: to even, as torch does on CUDA
    assert torch.equal(bits_of(weight), bits_of(theirs))
    for other in DTYPES:  # the same matrix, whatever is asked for
        assert torch.equal(aqlm.dequantize(packed, other), weight.to(other))


def test_codes_count_modulo_the_entries():
    """Damaged codes read what the package reads, and nothing out of bounds."""
    layout = Layout(2, 4, 8)
    packed = packed_of(layout)
    codes = torch.randint(-128, 128, packed.codes.shape, generator=torch.Generator().manual_seed(1))
    damaged = Packed(codes.to(torch.int8), packed.codebooks, packed.scales)
    weight = aqlm.dequantize(damaged, torch.float16)
    assert torch.equal(weight, of_package(damaged))
    assert not torch.equal(weight, aqlm.dequantize(packed, torch.float16))
    wide = Packed(codes.to(torch.int16), packed.codebooks, packed.scales)  # more bits than the entries need
    assert torch.equal(aqlm.dequantize(wide, torch.float16), weight)


@pytest.mark.parametrize("name", ["2x8g8", "2x12g4x2"])
def test_chunks_change_nothing(monkeypatch, name):
    packed = packed_of(LAYOUTS[name])
    whole = aqlm.dequantize(packed, torch.float32)
    monkeypatch.setattr(aqlm, "CHUNK_WEIGHTS", {"cpu": 5 * 192})  # ten or five rows at once: the last chunk has fewer
    assert torch.equal(aqlm.dequantize(packed, torch.float32), whole)


@pytest.mark.parametrize(
    ("name", "dtype"), [("1x16g8", torch.float16), ("2x8g8", torch.float16), ("8x8g32", torch.bfloat16)]
)
def test_temporaries_are_those_that_are_planned(monkeypatch, name, dtype):
    layout, shape = LAYOUTS[name], (28_672, 8192)
    sizes = (shape[0] // layout.out_group, shape[1] // layout.in_group, layout.books)
    packed = Packed(
        torch.empty(sizes, dtype=torch.int8 if layout.bits == 8 else torch.int16, device="meta"),
        torch.empty(layout.books, 1 << layout.bits, 1, layout.in_group, dtype=dtype, device="meta"),
        torch.empty(shape[0], 1, 1, 1, dtype=dtype, device="meta"),
    )
    monkeypatch.setattr(aqlm, "CHUNK_WEIGHTS", {"meta": aqlm.CHUNK_WEIGHTS["cuda"]})
    with LiveMemory() as memory:
        weight = aqlm.dequantize(packed, dtype)
    assert 0 < memory.peak - weight.nbytes <= format_facts.FORMATS["aqlm"].unpack_bytes


# ---- checkpoints


def stored(layout: str = "2x8g8", prefix: str = "a.q_proj", **changes: Tensor | None) -> Held:
    """A matrix of SHAPE with its tensors changed, None: removed."""
    made = {**tensors(SHAPE, LAYOUTS[layout], torch.float16), **{f".{name}": each for name, each in changes.items()}}
    return Held({prefix + suffix: each for suffix, each in made.items() if each is not None})


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_stored_is_what_is_read(name):
    layout = LAYOUTS[name]
    held = stored(name)
    checkpoint = held.checkpoint()
    assert aqlm.is_quantized(checkpoint.tensors, "a.q_proj")
    assert not aqlm.is_quantized(checkpoint.tensors, "a.k_proj")
    packed = aqlm.from_checkpoint(checkpoint, "a.q_proj")
    assert packed.shape == SHAPE
    assert [f"a.q_proj{suffix}" for suffix in aqlm.suffixes] == list(held.held)
    sizes = [each.nbytes for each in held.held.values()]
    assert aqlm.placed_bytes(checkpoint.tensors, "a.q_proj") == sizes
    assert aqlm.stored_bytes(checkpoint.tensors, "a.q_proj") == packed.nbytes == sum(sizes)
    places: list[Tensor] = []
    moved = packed.placed(lambda each: places.append(each) or each.clone(), torch.device("cpu"))
    assert [each.nbytes for each in places] == sizes
    assert torch.equal(aqlm.dequantize(moved, torch.float32), aqlm.dequantize(packed.to("cpu"), torch.float32))
    if layout.out_group == 1:
        assert aqlm.bytes(*SHAPE, layout.books, layout.bits, layout.in_group) == packed.nbytes


@pytest.mark.parametrize("name", ["1x16g8", "1x16g16", "2x8g8", "1x8g8", "8x8g32"])
def test_the_planner_counts_the_same_bytes(name):
    layout = LAYOUTS[name]
    planned = format_facts.matrix_bytes(Linears("q", 1152, 576, 1), "aqlm", name)
    assert planned == aqlm.bytes(1152, 576, layout.books, layout.bits, layout.in_group)


def test_bits_per_weight_of_a_large_matrix():
    count = 28_672 * 8192
    assert 8 * aqlm.bytes(28_672, 8192) / count == pytest.approx(2 + 8 * 2**20 / count + 16 / 8192)
    assert 8 * aqlm.bytes(28_672, 8192, 2, 8) / count == pytest.approx(2.002, abs=5e-4)
    assert 8 * aqlm.bytes(28_672, 8192, 1, 16, 16) / count == pytest.approx(1 + 16 * 2**20 / count + 16 / 8192)


def halves(*shape: int) -> Tensor:
    return torch.ones(shape).half()


CODES = torch.zeros(66, 12, 2, dtype=torch.int8)
SIZES = r"expected three-dimensional codes and four-dimensional codebooks"
DAMAGED: dict[str, tuple[Held, str]] = {
    "no codebooks": (stored(codebooks=None), r"lacks a\.q_proj\.codebooks"),
    "no scales": (stored(scales=None), r"lacks a\.q_proj\.scales"),
    "codes of floats": (stored(codes=CODES.half()), "codes are float16; expected int8 or int16"),
    "codes of 32 bits": (stored(codes=CODES.int()), "codes are int32"),
    "unsigned codes": (stored(codes=CODES.to(torch.uint8)), "codes are uint8"),
    "codes of two sizes": (stored(codes=CODES[..., 0]), SIZES),
    "codes of four sizes": (stored(codes=CODES[None]), SIZES),
    "codebooks of three sizes": (stored(codebooks=halves(2, 256, 8)), SIZES),
    "no rows": (stored(codes=CODES[:0], scales=halves(0, 1, 1, 1)), SIZES),
    "codewords of nothing": (stored(codebooks=halves(2, 256, 1, 0)), SIZES),
    "a codebook too few": (stored(codebooks=halves(1, 256, 1, 8)), "2 codes per group do not match 1 codebooks"),
    "a codebook too many": (stored(codebooks=halves(3, 256, 1, 8)), "2 codes per group do not match 3 codebooks"),
    "no power of two": (stored(codebooks=halves(2, 255, 1, 8)), "255 entries"),
    "one entry": (stored(codebooks=halves(2, 1, 1, 8)), "1 entries"),
    "more entries than codes": (stored(codebooks=halves(2, 512, 1, 8)), "512 entries"),
    "17 bits": (stored(codes=CODES.short(), codebooks=halves(2, 2**17, 1, 1)), "131072 entries"),
    "codebooks of integers": (stored(codebooks=CODES.new_ones(2, 256, 1, 8)), "codebooks are int8 and scales float16"),
    "codebooks of doubles": (stored(codebooks=halves(2, 256, 1, 8).double()), "codebooks are float64"),
    "scales of another type": (stored(scales=halves(66, 1, 1, 1).float()), "codebooks are float16 and scales float32"),
    "too few scales": (stored(scales=halves(65, 1, 1, 1)), r"scales have unexpected shape \[65, 1, 1, 1\]"),
    "scales for groups": (stored(scales=halves(66, 12, 1, 1)), r"scales have unexpected shape \[66, 12, 1, 1\]"),
    "scales of one size": (stored(scales=halves(66)), r"scales have unexpected shape \[66\]"),
    "infinite codeword": (stored(codebooks=halves(2, 256, 1, 8) / 0), "codebooks contain NaN or infinity"),
    "scale that is no number": (stored(scales=halves(66, 1, 1, 1) * torch.nan), "scales contain NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(case):
    held, why = DAMAGED[case]
    with pytest.raises(LocalqError, match=why) as caught:
        aqlm.from_checkpoint(held.checkpoint(), "a.q_proj")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.what == "a.q_proj"
    assert caught.value.next_step


# ---- the module


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("name", ["2x8g8", "2x12g4x2"])
def test_linear(name, bias):
    packed = packed_of(LAYOUTS[name])
    added = torch.randn(SHAPE[0]) if bias else None
    linear, x = aqlm.Linear(packed, added), torch.randn(5, SHAPE[1])
    dense = aqlm.dequantize(packed, torch.float32)
    assert torch.equal(linear(x), F.linear(x, dense, added))
    assert torch.equal(linear.tile_()(x), F.linear(x, dense, added))
    assert not list(linear.parameters())  # frozen: buffers only
    assert sum(each.nbytes for each in linear.buffers()) == packed.nbytes + (added.nbytes if bias else 0)
    assert linear.shape == SHAPE


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [0, 1, 7, 40, SHAPE[0], 10 * SHAPE[0]])
@pytest.mark.parametrize("name", ["2x8g8", "2x12g4x2"])
def test_slabs_give_the_whole_product(name, rows, bias):
    """On a GPU: a scratch for so many rows; 0: not even for one, which then takes memory of its own."""
    packed = packed_of(LAYOUTS[name])
    added = torch.randn(SHAPE[0]) if bias else None
    linear, x = aqlm.Linear(packed, added), torch.randn(5, SHAPE[1])
    expected = linear(x)
    linear.scratch = torch.full((max(rows * SHAPE[1] * 4, 1),), 255, dtype=torch.uint8)
    step = LAYOUTS[name].out_group
    assert linear.slab_rows(torch.float32) == max(rows // step * step, step)
    torch.testing.assert_close(linear._by_slabs(x), expected)


def test_a_slab_lies_in_the_scratch(monkeypatch):
    places = []

    def noted(packed: Packed, first: int, out: Tensor) -> Tensor:
        places.append((out.data_ptr(), tuple(out.shape), first))
        return out.zero_()

    monkeypatch.setattr(aqlm, "dequantize_rows", noted)
    linear = aqlm.Linear(packed_of(LAYOUTS["2x12g4x2"]))
    linear.scratch = torch.zeros(31 * SHAPE[1] * 2, dtype=torch.uint8)
    linear._by_slabs(torch.randn(9, SHAPE[1]).bfloat16())
    start = linear.scratch.data_ptr()
    assert places == [(start, (30, 96), 0), (start, (30, 96), 30), (start, (6, 96), 60)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_the_gpu(name, dtype):
    packed = packed_of(LAYOUTS[name], dtype, (322, 1088))
    weight = aqlm.dequantize(packed, dtype)
    assert torch.equal(aqlm.dequantize(packed.to("cuda"), dtype).cpu(), weight)
    linear = aqlm.Linear(packed.to("cuda"))
    linear.scratch = torch.empty(100 * 1088 * 2, dtype=torch.uint8, device="cuda")
    x = torch.randn(9, 1088, dtype=dtype, device="cuda")
    exact = x.double() @ weight.cuda().double().T
    naive_error = (F.linear(x, weight.cuda()).double() - exact).abs().max()
    assert (linear(x).double() - exact).abs().max() <= 2 * naive_error + 1e-6 * exact.abs().max()


def test_the_docstring_names_every_tensor():
    text = re.sub(r"\s+", " ", aqlm.__doc__ or "")
    assert all(f"P{suffix}" in text for suffix in aqlm.suffixes)
    assert "bits per weight" in text
