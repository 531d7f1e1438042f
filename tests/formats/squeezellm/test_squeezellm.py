"""SqueezeLLM against bytes worked by hand, an exact solution of what it minimises, and damaged checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.files.linears import Linears
from localq.formats import FORMATS, owner, squeezellm
from localq.formats.int4 import awq, gptq
from localq.formats.squeezellm import tiles as squeezellm_tiles
from localq.formats.squeezellm.fit import fitted
from tests.support.formats.memory_checkpoint import Held

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(out: int = 5, columns: int = 64) -> dict[str, Tensor]:
    return squeezellm.to_tensors(squeezellm.quantize(normal(out, columns)), "P")


def read(tensors: dict[str, Tensor], **said: Any) -> squeezellm.Packed:
    return squeezellm.from_checkpoint(Held(tensors).checkpoint({"quant_method": "squeezellm", **said}), "P")


# ---- by hand


def test_bytes_by_hand() -> None:
    """Word [j, r] has columns 8j to 8j + 7 of row r, lowest nibble first; a row has values of its own."""
    table = torch.stack((torch.arange(16.0), -torch.arange(16.0) / 4)).half()
    words = torch.tensor([[0x76543210, 0x0000000F], [-0x10000000, 0x00000021]], dtype=torch.int32)
    packed = read({"P.qweight": words, "P.lookup_table": table})
    assert packed.shape == (2, 16)
    assert packed.codes[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0, 0, 0, 0xF0]
    weight = squeezellm.dequantize(packed, torch.float32)
    assert weight[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 15]
    assert weight[1].tolist() == [-3.75, *[0] * 7, -0.25, -0.5, *[0] * 6]


def test_what_is_written_is_read_back() -> None:
    packed = squeezellm.quantize(normal(37, 96))
    tensors = squeezellm.to_tensors(packed, "P")
    described = {name.removeprefix("P"): (each.dtype, tuple(each.shape)) for name, each in tensors.items()}
    assert described == squeezellm.layout(37, 96)
    again = read(tensors, wbits=4)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(again.table, packed.table)
    assert sum(squeezellm.placed_bytes(Held(tensors).checkpoint().tensors, "P")) == packed.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_dequantized_by_themselves(dtype) -> None:
    packed = squeezellm.quantize(normal(9, 64))
    whole = squeezellm.dequantize(packed, dtype)
    part = squeezellm.dequantize_rows(packed, 4, torch.full((3, 64), torch.nan, dtype=dtype))
    assert torch.equal(part, whole[4:7])
    assert torch.equal(whole, squeezellm.dequantize(packed, torch.float16).to(dtype))  # nothing but f16 is in it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_of_other_types_are_rounded_to_float16(dtype) -> None:
    tensors = stored()
    table = tensors["P.lookup_table"].float() + 1e-5
    assert torch.equal(read({**tensors, "P.lookup_table": table.to(dtype)}).table, table.to(dtype).half())


def test_the_product_is_that_of_the_weights() -> None:
    packed, x, bias = squeezellm.quantize(normal(11, 64)), normal(3, 64, seed=1), normal(11, seed=2)
    weight = squeezellm.dequantize(packed, torch.float32)
    assert torch.equal(squeezellm.Linear(packed, bias)(x), torch.nn.functional.linear(x, weight, bias))


# ---- tiles


def test_tiles_by_hand() -> None:
    """Row 9 of 24, column 300: byte 150, the third step; behind 8 rows, 2 steps of 8 rows, one row of 64 bytes."""
    codes = torch.randint(256, (24, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = squeezellm_tiles.tile(codes)
    assert tiles.shape == codes.shape
    assert tiles.view(-1)[8 * 256 + 2 * 8 * 64 + 64 + 150 - 128] == codes[9, 150]
    assert tiles.unique().equal(codes.unique())


@pytest.mark.parametrize(("out", "columns"), [(8, 128), (24, 640), (80, 256)])
def test_tiles_are_undone_bit_for_bit(out, columns, monkeypatch) -> None:
    codes = torch.randint(256, (out, columns // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(out))
    tiles = squeezellm_tiles.tile(codes)
    assert torch.equal(squeezellm_tiles.untile(tiles), codes)
    for first, count in ((1, 5), (out - 3, 3), (out // 2, 1)):
        assert torch.equal(squeezellm_tiles.untile(tiles, first, count), codes[first : first + count])
    monkeypatch.setattr(squeezellm_tiles, "TILED_AT_A_TIME", 16 * columns // 2)  # two groups
    squeezellm_tiles.tile_(codes)
    assert torch.equal(codes, tiles)


@pytest.mark.parametrize(("out", "columns"), [(9, 256), (16, 192), (16, 32)])
def test_what_tiles_cannot_hold_stays_row_by_row(out, columns) -> None:
    packed = squeezellm.quantize(normal(out, columns))
    linear = squeezellm.Linear(packed).tile_()
    assert not linear.tiled
    assert linear.codes is packed.codes


def test_a_tiled_module_has_the_same_weights_and_files() -> None:
    dtype = torch.bfloat16
    packed = squeezellm.quantize(normal(40, 256))
    weight, tensors = squeezellm.dequantize(packed, dtype), squeezellm.to_tensors(packed, "P")
    linear = squeezellm.Linear(squeezellm.Packed(packed.codes.clone(), packed.table)).tile_().tile_()
    assert linear.tiled
    assert not torch.equal(linear.codes, packed.codes)
    assert torch.equal(linear.dequantized_rows(0, 40, dtype, None), weight)
    assert torch.equal(linear.dequantized_rows(13, 11, dtype, None), weight[13:24])
    for name, tensor in squeezellm.to_tensors(linear.packed, "P").items():
        assert torch.equal(tensor, tensors[name])
    x = normal(3, 256, seed=1)
    assert torch.equal(linear(x), x @ squeezellm.dequantize(packed, torch.float32).T)


def test_sizes() -> None:
    assert squeezellm.bytes(11008, 4096) == format_facts.matrix_bytes(Linears("", 11008, 4096, 1), "squeezellm")
    assert 8 * squeezellm.bytes(4096, 4096) / 4096**2 == 4 + 256 / 4096
    assert squeezellm.quantize(normal(7, 96)).nbytes == squeezellm.bytes(7, 96)


# ---- what is lost


def exact_loss(row: Tensor, importance: Tensor) -> float:
    """Of the best 16 values, by dynamic programming over all columns."""
    order = row.argsort()
    value, count = row[order].double(), importance[order].double()
    sums = [torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (count, count * value, count * value**2)]
    weight, total, square = (each[:, None] - each[None, :] for each in sums)  # [last, first]
    loss = square - total**2 / weight
    loss[torch.ones_like(loss, dtype=torch.bool).triu()] = torch.inf
    best = loss[:, 0]
    for _ in range(15):
        best = (loss + best).min(1).values
    return float(best[-1])


@pytest.mark.parametrize("kind", ["even", "weighed"])
@pytest.mark.parametrize("columns", [64, 576])
def test_it_loses_hardly_more_than_the_exact_solution(columns, kind) -> None:
    weight = normal(12, columns)
    weight[::3] = weight[::3] ** 3  # with outliers
    importance = torch.ones(columns) if kind == "even" else torch.exp(1.5 * normal(columns, seed=1))
    table, codes = fitted(weight, importance)
    apart = weight - torch.gather(table.float(), 1, codes.long())
    for row, lost in zip(weight, (importance * apart.square()).sum(1), strict=True):
        assert float(lost) <= 1.02 * exact_loss(row, importance) + 1e-6 * float((importance * row.square()).sum())


def test_columns_that_count_lose_less() -> None:
    weight, importance = normal(50, 256), torch.ones(256)
    importance[::2] = 100.0
    packed = [squeezellm.quantize(weight, each) for each in (None, importance)]
    even, weighed = (squeezellm.dequantize(each, torch.float32) for each in packed)
    assert (weighed - weight)[:, ::2].square().mean() < 0.8 * (even - weight)[:, ::2].square().mean()


def test_every_weight_takes_the_nearest_value() -> None:
    weight = normal(20, 128)
    packed = squeezellm.quantize(weight, torch.rand(128, generator=torch.Generator().manual_seed(1)))
    nearest = (weight[:, :, None] - packed.table.float()[:, None, :]).abs().min(2).values
    assert torch.equal((weight - squeezellm.dequantize(packed, torch.float32)).abs(), nearest)


@pytest.mark.parametrize(
    ("weight", "lost"),
    [
        (torch.zeros(3, 32), 0.0),
        (torch.arange(16.0).repeat(2, 4), 0.0),  # as many values as there are
        (torch.tensor([1.0, -1.0]).repeat(1, 32), 0.0),
        (torch.full((1, 32), 65504.0), 0.0),
        (2.0**-24 * torch.arange(32.0).view(1, 32), 3 * 2.0**-24),
    ],
)
def test_rows_of_few_values_and_of_the_largest_and_the_least(weight, lost) -> None:
    uneven = torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(1))
    for importance in (None, torch.zeros_like(uneven), uneven):
        packed = squeezellm.quantize(weight, importance)
        assert torch.isfinite(packed.table).all()
        assert (squeezellm.dequantize(packed, torch.float32) - weight).abs().max() <= lost


def test_a_column_of_no_importance_is_not_left_out() -> None:
    weight, importance = torch.cat((torch.zeros(4, 63), torch.full((4, 1), 9.0)), 1), torch.ones(64)
    importance[-1] = 0.0
    packed = squeezellm.quantize(weight, importance)
    assert (squeezellm.dequantize(packed, torch.float32) - weight).abs().max() < 0.01


def test_the_same_weights_give_the_same_bytes_whatever_is_beside_them() -> None:
    weight, importance = normal(600, 64), torch.rand(64, generator=torch.Generator().manual_seed(1))
    whole, part = squeezellm.quantize(weight, importance), squeezellm.quantize(weight[300:], importance)
    assert torch.equal(whole.codes[300:], part.codes)
    assert torch.equal(whole.table[300:], part.table)


@pytest.mark.parametrize(
    ("weight", "why"),
    [
        (torch.zeros(4, 40), "divisible by 32"),
        (torch.zeros(64), "divisible by 32"),
        (torch.zeros(0, 32), "divisible by 32"),
        (torch.full((1, 32), torch.nan), "NaN"),
        (torch.full((1, 32), torch.inf), "infinity"),
        (torch.full((1, 32), 7e4), "float16"),
    ],
)
def test_weights_that_it_does_not_take(weight, why) -> None:
    with pytest.raises(LocalqError, match=why) as caught:
        squeezellm.quantize(weight)
    assert caught.value.exit_code is ExitCode.BAD_FILE


# ---- among the formats, and damaged


def test_it_is_told_from_formats_with_tensors_of_the_same_name() -> None:
    tensors = Held(stored()).checkpoint().tensors
    assert owner(tensors, "P.qweight") == ("squeezellm", "P")
    assert list(FORMATS).index("squeezellm") < min(list(FORMATS).index(each) for each in ("awq", "gptq"))
    assert not squeezellm.is_quantized({"P.qweight": None, "P.qzeros": None, "P.scales": None}, "P")
    assert {module.suffixes[0] for module in (awq, gptq)} == {squeezellm.suffixes[0]}


def as_(suffix: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.__setitem__("P" + suffix, change(tensors["P" + suffix].clone()))


def last(value: float) -> Callable[[Tensor], Tensor]:
    def change(table: Tensor) -> Tensor:
        table.view(-1)[-1] = value
        return table

    return change


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "no codes": (lambda tensors: tensors.pop("P.qweight"), "lacks qweight"),
    "no table": (lambda tensors: tensors.pop("P.lookup_table"), "lacks lookup_table"),
    "codes of bytes": (as_(".qweight", lambda t: t.view(torch.uint8)), "qweight is uint8"),
    "codes of 64 bits": (as_(".qweight", lambda t: t.long()), "qweight is int64"),
    "codes of one size": (
        as_(".qweight", lambda t: t.flatten()),
        r"qweight is int32 \[40\]; expected int32 with two dimensions",
    ),
    "codes of three sizes": (as_(".qweight", lambda t: t[None]), "expected int32 with two dimensions"),
    "codes of no columns": (as_(".qweight", lambda t: t[:0]), "expected int32 with two dimensions"),
    "codes cut": (
        as_(".qweight", lambda t: t[:, :-1]),
        r"lookup_table is float16 \[5, 16\]; expected floats \[4, 16\]",
    ),
    "codes transposed": (as_(".qweight", lambda t: t.T.contiguous()), r"expected floats \[8, 16\]"),
    "a table of 3 bits": (as_(".lookup_table", lambda t: t[:, :8]), r"lookup_table is float16 \[5, 8\]"),
    "a table of integers": (as_(".lookup_table", lambda t: t.int()), "lookup_table is int32"),
    "a table of one size": (as_(".lookup_table", lambda t: t.flatten()), r"lookup_table is float16 \[80\]"),
    "a table with NaN": (as_(".lookup_table", last(float("nan"))), "lookup_table contains NaN"),
    "a table with infinity": (as_(".lookup_table", last(float("-inf"))), "lookup_table contains NaN, infinity"),
    "a table beyond float16": (as_(".lookup_table", lambda t: t.float() + 1e6), "outside the range of float16"),
    "outliers beside it": (lambda tensors: tensors.update({"P.rows": torch.zeros(6).int()}), r"sparse part \(.rows\)"),
    "rows beside it": (lambda tensors: tensors.update({"P.full_rows": torch.zeros(6)}), r"sparse part \(.full_rows\)"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_named(case) -> None:
    damage, why = DAMAGED[case]
    tensors = stored()
    damage(tensors)
    with pytest.raises(LocalqError, match=why) as caught:
        read(tensors)
    assert caught.value.exit_code is ExitCode.BAD_FILE


@pytest.mark.parametrize("bits", [3, "4", None, 4.0, True])
def test_other_bits_are_refused(bits) -> None:
    with pytest.raises(LocalqError, match=r"wbits is .*; only 4 is supported"):
        read(stored(), wbits=bits)
