"""MXFP4 against bytes worked by hand, against transformers and ggml, and against damaged checkpoints."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.engine.step.operands import operand
from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.files.linears import Linears
from localq.formats import FORMATS, mxfp4, owner
from localq.formats.mxfp4 import codec as mxfp4_codec
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from tests.support.formats.memory_checkpoint import Held

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BYTES = torch.arange(256, dtype=torch.uint8)


def sample(out: int, columns: int, seed: int = 0) -> Tensor:
    """f32, every block of another magnitude, some beyond what a scale can reach."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(out, columns // 32, 32, generator=generator)
    blocks *= torch.exp2(torch.randint(-40, 40, (out, columns // 32, 1), generator=generator).float())
    blocks[0, 0], blocks[1, 0], blocks[2, 0] = 0.0, blocks[1, 0] * 2.0**-140, 3e38
    return blocks.reshape(out, columns)


def packed_row(scale: int, *codes: int) -> mxfp4.Packed:
    """One row of one block that begins with these bytes of codes."""
    row = torch.zeros(1, 16, dtype=torch.uint8)
    row[0, : len(codes)] = torch.tensor(codes, dtype=torch.uint8)
    return mxfp4.Packed(row, torch.tensor([[scale]], dtype=torch.uint8))


# ---- by hand


def test_bytes_by_hand() -> None:
    assert mxfp4.VALUES.tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    weight = mxfp4.dequantize(packed_row(128, 0x21, 0xF7, 0x8A), torch.float32)  # 2 ** 1; the low nibble is first
    assert weight[0, :6].tolist() == [1.0, 2.0, 12.0, -12.0, -2.0, 0.0]
    assert math.copysign(1, weight[0, 5].item()) == -1  # code 8 is -0
    assert not weight[0, 6:].any()
    smallest = mxfp4.dequantize(packed_row(0, 0x21), torch.float32)
    assert smallest[0, :2].tolist() == [2.0**-128, 2.0**-127]


def test_quantizing_by_hand() -> None:
    row = torch.zeros(1, 32)
    row[0, :8] = torch.tensor([7.9, -6.1, 0.3, -0.2, 5.0, 3.5, 0.0, -1.7])  # the largest is below 8: scale 2 ** 0
    packed = mxfp4.quantize(row)
    assert packed.scales.tolist() == [[127]]
    # 6 and -6 (both saturate), .5 and -0, 4 and 4 (ties, even codes), 0 and -1.5
    assert packed.codes[0, :4].tolist() == [0xF7, 0x81, 0x66, 0xB0]
    packed = mxfp4.quantize(torch.full((1, 32), 8.0))
    assert packed.scales.tolist() == [[128]]
    assert packed.codes[0].tolist() == [0x66] * 16


def test_ties_take_the_even_code() -> None:
    row = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, *[0.0] * 24])
    packed = mxfp4.quantize(torch.stack((row, -row)))
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).reshape(2, 32)
    assert codes[0, :8].tolist() == [0, 2, 2, 4, 4, 6, 6, 7]
    assert codes[1, :8].tolist() == [8, 10, 10, 12, 12, 14, 14, 15]
    below, above = torch.nextafter(row[:7], torch.tensor(0.0)), torch.nextafter(row[:7], torch.tensor(9.0))
    packed = mxfp4.quantize(torch.cat((below, above, torch.tensor([6.0]), torch.zeros(17)))[None])
    codes = torch.stack((packed.codes & 15, packed.codes >> 4), -1).reshape(32)
    assert codes[:15].tolist() == [0, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 7, 7]


def test_blocks_of_zeros_and_of_the_least_numbers() -> None:
    zeros = mxfp4.quantize(torch.zeros(2, 32))
    assert not zeros.scales.any()
    assert not zeros.codes.any()
    least = mxfp4.quantize(torch.full((1, 32), 2.0**-149))
    assert least.scales.tolist() == [[0]]
    assert not mxfp4.dequantize(least, torch.float32).any()
    largest = mxfp4.quantize(torch.full((1, 32), torch.finfo(torch.float32).max))
    assert largest.scales.tolist() == [[252]]
    assert mxfp4.dequantize(largest, torch.float32)[0, 0].item() == 6 * 2.0**125


# ---- against others


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_at_every_scale_is_that_of_transformers(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).expand(1, 255, 16).contiguous()
    blocks = BYTES.reshape(1, 1, 16, 16).expand(1, 255, 16, 16).contiguous()  # [experts, out, blocks, 16]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T
    packed = mxfp4.Packed(blocks[0].reshape(255, 256), scales[0])
    ours = mxfp4.dequantize(packed, dtype)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(ours.view(integers), theirs.contiguous().view(integers))  # bit by bit: -0 and infinity too


def test_quantizing_is_that_of_ggml_where_nothing_ties() -> None:
    quants: Any = pytest.importorskip("gguf").quants
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
    packed = mxfp4.quantize(weight)
    theirs = torch.from_numpy(quants.MXFP4.quantize(weight.numpy())).reshape(64, 8, 17)
    assert torch.equal(packed.scales, theirs[..., 0])
    codes = torch.cat((theirs[..., 1:] & 15, theirs[..., 1:] >> 4), -1)  # a block's first half in the low nibbles
    ours = torch.stack((packed.codes & 15, packed.codes >> 4), -1).reshape(64, 8, 32)
    values = mxfp4.VALUES[ours.int()]
    assert torch.equal(values, mxfp4.VALUES[codes.int()])  # values: it has no -0


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_weight_gets_the_nearest_value_of_its_scale(dtype: torch.dtype) -> None:
    weight = sample(8, 96).to(dtype).nan_to_num(posinf=60_000, neginf=-60_000)
    packed = mxfp4.quantize(weight)
    exact = weight.double().reshape(8, 3, 32)
    scale = torch.exp2(packed.scales.double() - 127).unsqueeze(-1)
    values = mxfp4.dequantize(packed, torch.float32).double().reshape(8, 3, 32)
    candidates = scale.unsqueeze(-1) * mxfp4.VALUES.double()
    nearest = (exact.unsqueeze(-1) - candidates).abs().amin(-1)
    assert torch.equal((exact - values).abs(), nearest)
    largest = exact.abs().amax(-1)
    sound = (largest > 0) & (packed.scales > 0)
    ratio = (largest / scale.squeeze(-1))[sound]
    assert ((ratio >= 4) & (ratio < 8)).all()


def test_what_was_quantized_once_stays_as_it_is() -> None:
    values = mxfp4.dequantize(mxfp4.quantize(sample(8, 96)), torch.float32)
    assert torch.equal(mxfp4.dequantize(mxfp4.quantize(values), torch.float32), values)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(7, 64)
    packed = mxfp4.quantize(weight)
    dense = mxfp4.dequantize(packed, torch.float16)
    monkeypatch.setattr(mxfp4_codec, "CHUNK_WEIGHTS", {"cpu": 2 * 64 + 5})
    again = mxfp4.quantize(weight)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(again.scales, packed.scales)
    assert torch.equal(mxfp4.dequantize(packed, torch.float16), dense)


def test_slabs_give_what_the_whole_gives() -> None:
    linear = mxfp4.Linear(mxfp4.quantize(sample(10, 64).clamp(-4, 4)), torch.randn(10))
    x = torch.randn(3, 64)
    linear.scratch = torch.empty(4 * 64 * 4, dtype=torch.uint8)  # four rows in f32
    torch.testing.assert_close(linear._by_slabs(x), linear(x))


def test_rows_that_no_kernel_takes_are_multiplied_in_slabs(monkeypatch) -> None:
    """Odd and wide ones; neither is an operand of the fused step."""
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(mxfp4_kernel, "WIDEST", 128)
    monkeypatch.setattr(mxfp4_kernel, "mxfp4_gemv", lambda x, operands: "by the kernel")
    monkeypatch.setattr(
        mxfp4_kernel, "mxfp4_dequantize",
        lambda matrix, dtype, out, rows: mxfp4.dequantize(mxfp4.Packed(matrix.codes, matrix.scales), dtype),
    )  # fmt: skip
    for columns in (96, 128, 192):
        linear = mxfp4.Linear(mxfp4.quantize(torch.randn(8, columns)))
        x = torch.randn(2, columns).bfloat16()
        expected = torch.nn.functional.linear(x, mxfp4.dequantize(linear.packed, torch.bfloat16))
        assert linear(x) == "by the kernel" if columns == 128 else torch.equal(linear(x), expected)
        assert (operand(linear) is not None) == (columns == 128)


def test_bytes_are_those_that_are_planned() -> None:
    assert mxfp4.bytes(24, 256) == format_facts.matrix_bytes(Linears("x", 24, 256, 1), "mxfp4")


# ---- checkpoints


def test_a_checkpoint_gives_back_what_was_written() -> None:
    packed = mxfp4.quantize(sample(8, 96))
    checkpoint = Held(mxfp4.to_tensors(packed, "model.layers.0.p")).checkpoint()
    assert {name: list(each.shape) for name, each in checkpoint.tensors.items()} == {
        "model.layers.0.p.weight_blocks": [8, 3, 16],
        "model.layers.0.p.weight_scales": [8, 3],
    }
    assert owner(checkpoint.tensors, "model.layers.0.p.weight_blocks") == ("mxfp4", "model.layers.0.p")
    assert [n for n, m in FORMATS.items() if m.is_quantized(checkpoint.tensors, "model.layers.0.p")] == ["mxfp4"]
    assert mxfp4.stored_bytes(checkpoint.tensors, "model.layers.0.p") == packed.nbytes == mxfp4.bytes(8, 96)
    read = mxfp4.from_checkpoint(checkpoint, "model.layers.0.p")
    assert torch.equal(read.codes, packed.codes)
    assert torch.equal(read.scales, packed.scales)


def damaged(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = dict(mxfp4.to_tensors(mxfp4.quantize(torch.randn(8, 96)), "p"))
    tensors |= {f"p.weight_{name}": change for name, change in changes.items()}
    return {name: each for name, each in tensors.items() if each is not None}


NAN_SCALE = torch.full((8, 3), 127, dtype=torch.uint8)
NAN_SCALE[5, 2] = 255
DAMAGED = {
    "no scales": damaged(scales=None),
    "scales of another shape": damaged(scales=torch.zeros(8, 2, dtype=torch.uint8)),
    "scales of another type": damaged(scales=torch.zeros(8, 3, dtype=torch.int8)),
    "a scale that is no number": damaged(scales=NAN_SCALE),
    "blocks of another size": damaged(blocks=torch.zeros(8, 3, 8, dtype=torch.uint8)),
    "blocks of another type": damaged(blocks=torch.zeros(8, 3, 16)),
    "blocks without a dimension": damaged(blocks=torch.zeros(8, 48, dtype=torch.uint8)),
    "no rows": damaged(blocks=torch.zeros(0, 3, 16, dtype=torch.uint8), scales=torch.zeros(0, 3, dtype=torch.uint8)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(case: str) -> None:
    with pytest.raises(LocalqError) as caught:
        mxfp4.from_checkpoint(Held(DAMAGED[case]).checkpoint(), "p")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "p" in caught.value.what


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (torch.ones(2, 48), "divisible by 32"),
        (torch.ones(64), "divisible by 32"),
        (torch.ones(2, 64, dtype=torch.int32), "floats"),
        (torch.tensor([[1.0] * 31 + [math.nan]]), "NaN"),
        (torch.tensor([[1.0] * 31 + [-math.inf]]), "infinity"),
    ],
)
def test_what_cannot_be_quantized_is_refused(weight: Tensor, said: str) -> None:
    with pytest.raises(LocalqError, match=said) as caught:
        mxfp4.quantize(weight)
    assert caught.value.exit_code == ExitCode.BAD_FILE


# ---- as compressed-tensors stores it


def compressed(seed: int = 0) -> dict[str, Tensor]:
    packed = mxfp4.sample((48, 128), seed)
    return {"P.weight_packed": packed.codes, "P.weight_scale": packed.scales}


def test_compressed_tensors_has_the_same_bytes() -> None:
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme

    made = compressed()
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    held = {name.removeprefix("P."): each for name, each in made.items()}
    expected = MXFP4PackedCompressor.decompress(held, scheme)["weight"]
    checkpoint = Held(made).checkpoint()
    assert owner(checkpoint.tensors, "P.weight_packed") == ("mxfp4", "P")
    packed = mxfp4.from_checkpoint(checkpoint, "P")
    assert torch.equal(mxfp4.dequantize(packed, torch.bfloat16), expected)
    assert sum(mxfp4.placed_bytes(checkpoint.tensors, "P")) == packed.nbytes


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda made: made.update({"P.weight_scale": made["P.weight_scale"][:, :3]}),
            r"weight_scale has shape \[48, 3\]",
        ),
        (lambda made: made.update({"P.weight_packed": made["P.weight_packed"].flatten()}), "weight_packed has shape"),
        (lambda made: made["P.weight_scale"][5, 1].fill_(255), "a scale is 255, which encodes NaN"),
    ],
)
def test_damaged_files_of_compressed_tensors_are_refused(change: Any, why: str) -> None:
    made = compressed()
    change(made)
    with pytest.raises(LocalqError, match=why) as caught:
        mxfp4.from_checkpoint(Held(made).checkpoint(), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
