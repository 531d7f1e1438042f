"""Binary codes against bytes worked by hand, damaged checkpoints. The solver has a file of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts, format_sizes, schemes
from localq.files.linears import Linears
from localq.formats import FORMATS, bcq, owner
from localq.formats.bcq import codec as bcq_codec
from localq.formats.bcq import tiles as bcq_tiles
from localq.planner import slabs
from tests.support.engine.live_memory import LiveMemory
from tests.support.formats.memory_checkpoint import Held
from tests.support.kernels.bcq_operands import random_packed

SCHEMES = ("q1row", "q2g32", "q3g128", "q3g64z", "q4g512", "q5rowz")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- by hand


def test_bytes_by_hand() -> None:
    """Two planes of one row of eight columns, and a zero point."""
    codes = torch.tensor([[[0b0000_0011], [0b1000_0001]]], dtype=torch.uint8)
    scales = torch.tensor([[[2.0], [0.5], [10.0]]]).half()
    packed = bcq.Packed(codes, scales)
    assert packed.shape == (1, 8)
    assert (packed.planes, packed.group, packed.zero_point) == (2, 8, True)
    assert bcq.dequantize(packed, torch.float32).tolist() == [[12.5, 11.5, 7.5, 7.5, 7.5, 7.5, 7.5, 8.5]]
    plain = bcq.dequantize(bcq.Packed(codes, scales[:, :2]), torch.bfloat16)
    assert plain.tolist() == [[2.5, 1.5, -2.5, -2.5, -2.5, -2.5, -2.5, -1.5]]


def test_groups_by_hand() -> None:
    """40 columns in groups of 32: the last has eight."""
    codes = torch.full((1, 1, 5), 255, dtype=torch.uint8)
    packed = bcq.Packed(codes, torch.tensor([[[1.0, 3.0]]]).half())
    assert packed.group == 32
    assert bcq.dequantize(packed, torch.float16).tolist() == [[1.0] * 32 + [3.0] * 8]


def test_a_zero_has_no_sign() -> None:
    packed = bcq.Packed(torch.zeros(1, 1, 1, dtype=torch.uint8), torch.zeros(1, 1, 1).half())
    assert not torch.signbit(bcq.dequantize(packed, torch.float32)).any()


def test_quantizing_by_hand() -> None:
    """One plane: the signs, and the mean of the magnitudes."""
    packed = bcq.quantize(torch.tensor([[1.0, -2.0, 3.0, -4.0, 1.0, -2.0, 3.0, -4.0]]), 1, 0)
    assert packed.codes.tolist() == [[[0b0101_0101]]]
    assert packed.scales.tolist() == [[[2.5]]]
    with_zero = bcq.quantize(torch.tensor([[1.0, 5.0] * 4]), 1, 0, zero_point=True)
    assert with_zero.scales.tolist() == [[[2.0], [3.0]]]


UNFIT = {
    "columns": torch.zeros(4, 12),
    "a vector": torch.zeros(8),
    "NaN": torch.full((1, 8), torch.nan),
    "integers": torch.zeros(2, 8, dtype=torch.int32),
}


@pytest.mark.parametrize("weight", UNFIT.values(), ids=UNFIT)
def test_what_it_does_not_take(weight: Tensor) -> None:
    with pytest.raises(LocalqError) as caught:
        bcq.quantize(weight)
    assert caught.value.exit_code == ExitCode.BAD_FILE


# ---- orders, sizes, checkpoints


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(16, 1024), (35, 2216), (48, 72)], ids=str)
def test_sizes_and_tiles(scheme: str, shape: tuple[int, int]) -> None:
    maker = bcq.of_scheme(scheme)
    packed = random_packed(shape, maker.planes, maker.group, maker.zero_point)
    assert bcq.bytes(*shape, maker.planes, maker.group, maker.zero_point) == packed.nbytes
    assert format_facts.matrix_bytes(Linears("", *shape, 1), "bcq", scheme) == packed.nbytes
    tensors = bcq.to_tensors(packed, "P")
    described = {f"P{suffix}": form for suffix, form in maker.layout(*shape).items()}
    assert {name: (each.dtype, tuple(each.shape)) for name, each in tensors.items()} == described
    linear = bcq.Linear(bcq.Packed(packed.codes.clone(), packed.scales.clone())).put_into_tiles()
    assert linear.codes.numel() == bcq_tiles.code_bytes(shape[0], maker.planes, shape[1])
    back = linear.packed
    assert torch.equal(back.codes, packed.codes)
    assert torch.equal(back.scales, packed.scales)
    rows = linear.dequantized_rows(16, 7, torch.float32, None) if shape[0] > 16 else None
    assert rows is None or torch.equal(rows, bcq.dequantize(packed, torch.float32)[16:23])


@pytest.mark.parametrize("scheme", ["q3g128", "q5g32z", "q5rowz"])
def test_temporaries_are_those_that_are_planned(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in 32 bit on a GPU, which puts tiles back: a slab as large as they get."""
    monkeypatch.setitem(bcq_codec.CHUNK_WEIGHTS, "meta", bcq_codec.CHUNK_WEIGHTS["cuda"])
    signs, alphas = bcq.of_scheme(scheme).layout(8176, 8208).values()
    packed = bcq.Packed(*(torch.empty(shape, dtype=dtype, device="meta") for dtype, shape in (signs, alphas)))
    linear, slab = bcq.Linear(packed).put_into_tiles(), torch.empty(8176, 8208, device="meta")
    assert slabs.PREFILL_SCRATCH - 2048 < slab.nbytes <= slabs.PREFILL_SCRATCH
    with LiveMemory() as memory:
        linear.dequantized_rows(0, 8176, torch.float32, slab)
    assert 0 < memory.peak <= format_facts.FORMATS["bcq"].unpack_bytes


def test_tiles_are_put_back_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bcq_codec.CHUNK_WEIGHTS, "cpu", 2 * 16 * 72)
    packed = random_packed((83, 72), 2, 32, zero_point=True)
    expected = bcq.dequantize(packed, torch.bfloat16)
    linear = bcq.Linear(packed).put_into_tiles()
    assert torch.equal(linear.dequantized_rows(0, 83, torch.bfloat16, None), expected)
    assert torch.equal(linear.dequantized_rows(16, 67, torch.bfloat16, None), expected[16:])


def test_the_order_of_signs() -> None:
    """Bit i of the word at (tile, block, plane, g, word, half) is the sign of column 128 block + 32 word + i of row
    16 tile + g + 8 half; what fills up is zero."""
    packed = random_packed((37, 328), 3, 64, zero_point=True, seed=2)
    found = bcq_tiles.tile_codes(packed.codes).view(torch.int32).view(3, 3, 3, 8, 4, 2)
    assert bcq_tiles.code_bytes(37, 3, 328) == found.nbytes
    signs = torch.zeros(48, 3, 384, dtype=torch.bool)
    signs[:37, :, :328] = bcq_codec.unpacked(packed.codes)
    for tile, block, plane, g, word, half in (
        (0, 0, 0, 0, 0, 0),
        (1, 2, 1, 5, 1, 1),
        (2, 1, 2, 3, 3, 0),
        (2, 2, 0, 7, 2, 1),
    ):
        columns = 128 * block + 32 * word
        expected = signs[16 * tile + g + 8 * half, plane, columns : columns + 32]
        assert (
            found[tile, block, plane, g, word, half].item() >> torch.arange(32) & 1
        ).bool().tolist() == expected.tolist()


@pytest.mark.parametrize("shape", [(48, 384), (37, 328), (16, 1024)], ids=str)
def test_tiles_and_back(shape: tuple[int, int]) -> None:
    packed = random_packed(shape, 2, 64, zero_point=shape[0] > 16, seed=1)
    codes, scales = bcq_tiles.tile_(packed.codes.clone(), packed.scales.clone())
    kept = tuple(packed.codes.shape), tuple(packed.scales.shape)
    assert codes.nbytes == bcq_tiles.code_bytes(shape[0], 2, shape[1])
    for first, count in ((0, shape[0]), (shape[0] // 16 * 16 - 16, 13)):
        part = packed.rows(first, count)
        assert torch.equal(bcq_tiles.untile_codes(codes.view(-1), kept[0], first, count), part.codes)
        assert torch.equal(bcq_tiles.untile_scales(scales.view(-1), kept[1], 2, first, count), part.scales)


@pytest.mark.parametrize(("scheme", "planes"), [("q3g128", 3), ("q2row", 2), ("mix2.27", 3)])
def test_what_fills_up_tiles_is_planned(scheme: str, planes: int) -> None:
    """Of a mixture as if every matrix had as many planes as its bits, rounded up."""
    for shape in ((48, 72), (35, 2216), (64, 1024)):
        held = bcq_tiles.code_bytes(shape[0], planes, shape[1])
        assert format_sizes.sign_padding(Linears("", *shape, 1), scheme) == held - shape[0] * planes * shape[1] // 8


@pytest.mark.parametrize("shape", [(48, 128), (40, 128), (48, 72), (35, 2216)])
def test_padding_is_what_tiles_have_in_addition(shape: tuple[int, int]) -> None:
    """The ledger counts it as tables, as the plan does: weights are the bytes of the file."""
    packed = random_packed(shape, 3, 128, zero_point=False)
    stored = packed.codes.nbytes + packed.scales.nbytes
    linear = bcq.Linear(packed)
    assert linear.padding_bytes == 0
    linear.put_into_tiles()
    assert linear.padding_bytes == linear.codes.nbytes + linear.scales.nbytes - stored
    rows = -(-shape[0] // 16) * 16
    scales = (rows - shape[0]) * packed.scales[0].nbytes
    assert linear.padding_bytes == format_sizes.sign_padding(Linears("", *shape, 1), "q3g128") + scales


def test_schemes() -> None:
    assert schemes.bcq_scheme("q4g64z") == (4, 64, True)
    assert schemes.bcq_scheme("q2row") == (2, 0, False)
    assert schemes.bcq_scheme("") == (3, 128, False)
    for scheme in ("q6g128", "q3g100", "q3", "g128", "q3g128zz"):
        with pytest.raises(LocalqError, match="not a valid bcq scheme"):
            schemes.bcq_scheme(scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_checkpoint_gives_back_what_it_was_given(scheme: str) -> None:
    packed = bcq.of_scheme(scheme).quantize(normal(20, 328))
    held = Held(bcq.to_tensors(packed, "model.P")).checkpoint()
    assert owner(held.tensors, "model.P.signs") == ("bcq", "model.P")
    assert FORMATS["bcq"] is bcq
    read = bcq.from_checkpoint(held, "model.P")
    assert torch.equal(read.codes, packed.codes)
    assert torch.equal(read.scales, packed.scales)
    assert bcq.stored_bytes(held.tensors, "model.P") == packed.nbytes
    assert bcq.stored_shape(held, "model.P") == (20, 328)


def changed(**tensors: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def change(held: dict[str, Tensor]) -> None:
        for name, each in tensors.items():
            held[f"P.{name}"] = each(held[f"P.{name}"])

    return change


DAMAGED = {
    "signs of another type": changed(signs=lambda t: t.to(torch.int16)),
    "scales of another type": changed(alphas=lambda t: t.float()),
    "other rows": changed(alphas=lambda t: t[:-1]),
    "six planes": changed(signs=lambda t: t.repeat(1, 3, 1), alphas=lambda t: t.repeat(1, 3, 1)),
    "two zero points": changed(alphas=lambda t: t.repeat(1, 2, 1)),
    "fewer scales than planes": changed(alphas=lambda t: t[:, :1]),
    "groups that no size makes": changed(alphas=lambda t: t[:, :, :2].repeat(1, 1, 10)),
    "no columns": changed(signs=lambda t: t[:, :, :0]),
    "a matrix": changed(signs=lambda t: t[0]),
    "an infinite scale": changed(alphas=lambda t: t / 0),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_weights_are_named(case: str) -> None:
    packed = random_packed((20, 328), 2, 128, zero_point=False)
    tensors = bcq.to_tensors(packed, "P")
    DAMAGED[case](tensors)
    with pytest.raises(LocalqError, match="damaged binary codes") as caught:
        bcq.from_checkpoint(Held(tensors).checkpoint(), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
