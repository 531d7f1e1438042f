"""Bits per weight: by hand for a small matrix, as stored for whole checkpoints."""

from __future__ import annotations

import pytest
import torch

from localq.bench.quality import bits
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.formats.checkpoint import TensorInfo
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint


def described(out: int, columns: int) -> dict[str, TensorInfo]:
    """The header of one matrix as `nf4.layout` has it."""
    found = {}
    for suffix, (dtype, shape) in nf4.layout(out, columns).items():
        count = torch.Size(shape).numel()
        found["w" + suffix] = TensorInfo(str(dtype).removeprefix("torch."), shape, count * dtype.itemsize)
    return found


def test_one_matrix_by_hand():
    # 192 x 128: 12,288 bytes of codes, 384 of scales, 2 nested scales, two tables of 16 and 256 numbers, the offset
    stored = nf4.stored_bytes(described(192, 128), "w")
    assert stored == 12_288 + 384 + 4 * 2 + 4 * 16 + 4 * 256 + 4
    large = 8 * nf4.stored_bytes(described(28_672, 8192), "w") / (28_672 * 8192)
    assert large == pytest.approx(4 + 8 / 64 + 32 / 16_384, abs=1e-4)
    assert round(large, 3) == 4.127


def test_without_double_quantization():
    header = {name: info for name, info in described(64, 128).items() if ".nested" not in name}
    header["w.weight.absmax"] = TensorInfo("float32", (128,), 512)
    assert nf4.stored_bytes(header, "w") == 64 * 64 + 512 + 64


def test_whole_models(tmp_path):
    plain = open_model(make_checkpoint(tmp_path / "plain"))
    assert bits.per_weight(plain) == 16
    files = open_model(convert(TensorwiseRequest(plain, "nf4", tmp_path / "nf4")))
    # the linears of one of the three blocks of `tiny_checkpoints.TINY`
    shapes = [(128, 128), (64, 128), (64, 128), (128, 128), (192, 128), (192, 128), (128, 192)]
    count = sum(out * columns for out, columns in shapes)
    stored = sum(nf4.stored_bytes(described(*shape), "w") for shape in shapes)
    assert bits.per_weight(files) == 8 * stored / count
    head = 320 * 128 + 4 * 320  # in 8 bit, made on loading
    assert bits.per_weight(files, "8") == 8 * (3 * stored + head) / (3 * count + 320 * 128)
    assert bits.per_weight(plain, "8") == 8 + 32 / 128
    assert bits.per_weight(plain, "nf4") == 8 * nf4.bytes(320, 128) / (320 * 128)
