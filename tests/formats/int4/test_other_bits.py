"""GPTQ in 2, 3 and 8 bits, compressed-tensors in 8: the formula and the package, models of several bits, damage."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from localq import formats
from localq.engine.load import weights
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.catalog import resolve
from localq.files.model_folder import ModelFiles, open_model
from localq.files.stored_format import scheme_of
from localq.formats import owner
from localq.formats.int4 import compressed, gptq
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner import uncatalogued
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import expert_checkpoints
from tests.support.formats.int4_checkpoints import (
    COMPRESSED,
    Int4,
    checkpoint_of,
    compressed_config,
    compressed_group,
    reference,
    tensors,
    write,
)
from tests.support.kernels import reference_kernels

CPU = LoadOptions(device="cpu", dtype="float32")
DOWN = "model.layers.0.mlp.down_proj"
MODULES = {"gptq": gptq, COMPRESSED: compressed}
CASES = (
    *(Int4("gptq", 64, bits=bits) for bits in (2, 3, 8)),
    *(Int4("gptq", 64, version="gptq_v2", bits=bits) for bits in (2, 3, 8)),
    *(Int4("gptq", 64, act_order=True, bits=bits) for bits in (2, 3, 8)),
    Int4("gptq", 32, bits=8), Int4("gptq", 128, g_idx=False, bits=8), Int4("gptq", -1, bits=8),
    *(Int4(COMPRESSED, group, symmetric=symmetric, bits=8) for group in (32, 128, -1) for symmetric in (True, False)),
    Int4(COMPRESSED, 64, act_order=True, bits=8),
)  # fmt: skip
SHAPE = (96, 384)


def stored_of(of: Int4, dtype: torch.dtype = torch.float16, shape: tuple[int, int] = SHAPE) -> dict[str, Tensor]:
    return tensors(shape, of, dtype)


@pytest.mark.parametrize("of", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_weights_are_those_of_the_program(of, dtype):
    made, module = stored_of(of, dtype), MODULES[of.method]
    checkpoint = checkpoint_of(made, of.config)
    assert owner(checkpoint.tensors, "P" + next(iter(made))) == (of.method, "P")
    packed = module.from_checkpoint(checkpoint, "P")
    exact = reference(made, of)
    assert torch.equal(module.dequantize(packed, dtype), exact)
    assert torch.equal(module.dequantize(packed, torch.bfloat16), exact.bfloat16())
    assert module.stored_shape(checkpoint, "P") == packed.shape == SHAPE
    assert sum(formats.placed_bytes(module, checkpoint, "P")) == packed.nbytes


def test_a_group_with_fewer_columns_at_the_end():
    of = Int4("gptq", 128, bits=8)
    made = tensors((48, 320), of)
    packed = gptq.from_checkpoint(checkpoint_of(made, of.config), "P")
    assert (packed.group, packed.scales.shape) == (64, (5, 48))  # of which both 128 and 320 are multiples
    assert torch.equal(gptq.dequantize(packed, torch.float16), reference(made, of))


def test_three_bits_of_gptqmodel():
    """Whole words less the constants that it subtracts when it saves."""
    of = Int4("gptq", 64, bits=3, version="gptq_v2")
    made = stored_of(of)
    exact = reference(made, of)
    constants = torch.tensor([0x24924924, 0x92492492, 0x49249249]).repeat(SHAPE[0] // 32)
    words = (made[".qzeros"].long() - constants + 2**31) % 2**32 - 2**31
    stated = {**of.config, "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:2.0.0"]}}
    packed = gptq.from_checkpoint(checkpoint_of({**made, ".qzeros": words.to(torch.int32)}, stated), "P")
    assert torch.equal(gptq.dequantize(packed, torch.float16), exact)


@pytest.mark.parametrize("strategy", ["channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bytes_of_integers_are_those_of_the_package(strategy, symmetric, dtype):
    from compressed_tensors.compressors import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    of = Int4(COMPRESSED, -1 if strategy == "channel" else 64, symmetric=symmetric, bits=8)
    made = int_quantized(SHAPE, of, dtype)
    scheme = QuantizationScheme(targets=["Linear"], weights=compressed_group(of)["weights"])
    held = {name.removeprefix("."): each for name, each in made.items()}
    exact = NaiveQuantizationCompressor.decompress(held, scheme)["weight"]
    checkpoint = checkpoint_of(made, {**of.config, "format": "int-quantized"})
    assert owner(checkpoint.tensors, "P.weight") == (COMPRESSED, "P")
    packed = compressed.from_checkpoint(checkpoint, "P")
    assert torch.equal(compressed.dequantize(packed, dtype), exact)
    assert sum(formats.placed_bytes(compressed, checkpoint, "P")) == packed.nbytes
    assert (packed.zeros is None) == (symmetric and strategy == "channel")


def int_quantized(shape: tuple[int, int], of: Int4, dtype: torch.dtype) -> dict[str, Tensor]:
    """Suffix -> random tensor, as W8A8 is stored."""
    torch.manual_seed(1)
    out, columns = shape
    groups = 1 if of.group == -1 else columns // of.group
    made = {".weight": torch.randint(-128, 128, shape).to(torch.int8)}
    made[".weight_scale"] = ((0.5 + torch.rand(out, groups)) * 1e-3).to(dtype)
    if not of.symmetric:
        made[".weight_zero_point"] = torch.randint(-128, 128, (out, groups)).to(torch.int8)
    return made


@pytest.mark.parametrize("of", [each for each in CASES if each.bits == 8], ids=str)
def test_slabs_of_any_size_give_the_product(of):
    module = MODULES[of.method]
    packed = module.from_checkpoint(checkpoint_of(stored_of(of), of.config), "P")
    bias, x = torch.randn(SHAPE[0]), torch.randn(11, SHAPE[1])
    expected = F.linear(x, module.dequantize(packed, torch.float32), bias)
    linear = module.Linear(packed, bias)
    for _ in ("as in the file", "in tiles"):
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)
        for rows in (16, 48):
            linear.scratch = torch.zeros(4 * SHAPE[1] * rows, dtype=torch.uint8)
            torch.testing.assert_close(linear._by_slabs(x), expected, rtol=1e-5, atol=1e-4)
        linear.tile_()
    assert linear.tiled
    assert (linear.operand() is None) == of.act_order  # the fused step has x in order


@pytest.mark.parametrize("scheme", ["g128, 8 bits", "g32, 8 bits", "row, 8 bits"])
def test_what_is_stored_comes_back(monkeypatch, scheme):
    reference_kernels.install(monkeypatch)
    for module in (gptq, compressed):
        packed = module.sample((96, 256), 1, scheme=scheme)
        stated = module.quantization_config("float16", [], scheme)
        if packed.zeros is None and module is compressed:
            stated["config_groups"]["group_0"]["weights"]["symmetric"] = True
        found = module.from_checkpoint(checkpoint_of(module.stored(packed), stated), "P")
        assert torch.equal(module.dequantize(found, torch.float16), module.dequantize(packed, torch.float16))
        weight = module.dequantize(packed, torch.float32)
        assert 0.3 < float(weight.square().mean()) * 256 < 3
        assert torch.equal(module.Linear(packed).tile_().unpack(32, torch.empty(32, 256)), weight[32:64])
        assert module.fits(96, 256, scheme)


def test_groups_that_no_kernel_has_stay():
    of = Int4("gptq", 16, bits=8)
    made = stored_of(of)
    packed = gptq.from_checkpoint(checkpoint_of(made, of.config), "P")
    linear = gptq.Linear(packed).tile_()
    assert (packed.group, linear.tiled, linear.operand()) == (16, False, None)
    assert torch.equal(linear.packed.codes, packed.codes)


@pytest.mark.parametrize("of", CASES[:3] + CASES[-2:], ids=str)
def test_logits_are_those_of_the_dequantized_model(tmp_path, of):
    layers = write(tmp_path / "m", of, torch.float16, num_hidden_layers=1)
    held = expert_checkpoints.read(tmp_path / "m")
    plain = {name: each for name, each in held.items() if not name.startswith(tuple(f"{path}." for path in layers))}
    plain |= {f"{path}.weight": reference(made, of) for path, made in layers.items()}
    files, ids = open_model(tmp_path / "m"), prompt_of(12)
    found = load(files, CPU)
    assert (found.format, scheme_of(files)) == (
        of.method,
        "g64" + f", {of.bits} bits" if of.group == 64 else scheme_of(files),
    )
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["quantization_config"]
    folder = Path(shutil.copytree(tmp_path / "m", tmp_path / "plain"))
    (folder / "config.json").write_text(json.dumps(config))
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    exact = load(open_model(folder), CPU)
    assert torch.equal(logits_of(found.model, found, ids), logits_of(exact.model, exact, ids))
    offer = uncatalogued.offer(resolve(str(tmp_path / "m")), offline=True)
    assert (offer.format, offer.unsupported) == (of.method, None)
    assert offer.block_bytes == blocks_of(files)


def blocks_of(files: ModelFiles) -> int:
    """Bytes of the blocks on a GPU, by the loader."""
    family = architecture(files.config, "m")
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    with open_checkpoint(files, packed=True) as checkpoint:
        assignment = weights.assign(checkpoint, model, family.rename, "m")
        return sum(weights.block_sizes(assignment, checkpoint, model, torch.float16, packed=True))


def restate(folder: Path, stated: dict[str, Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))
    return folder


def test_layers_of_auto_round_have_bits_of_their_own(tmp_path):
    """2, 3, 4 and 8 in one model; `extra_config` names them, and their tensors say the same."""
    of = Int4("gptq", 64, g_idx=False)
    layers = write(tmp_path / "m", of, torch.float32, num_hidden_layers=1)
    held = load_file(tmp_path / "m" / "model.safetensors")
    paths = dict(zip(sorted(layers), (2, 3, 8, 4, 8, 3, 2), strict=True))
    for path, bits in paths.items():
        out, columns = layers[path][".scales"].shape[1], layers[path][".qweight"].shape[0] * 8
        held |= {
            path + suffix: each
            for suffix, each in tensors((out, columns), replace(of, bits=bits), torch.float32).items()
        }
    save_file(held, tmp_path / "m" / "model.safetensors")
    stated = {"quant_method": "auto-round", "bits": 4, "group_size": 64, "packing_format": "auto_round:auto_gptq",
              "extra_config": {path: {"bits": bits} for path, bits in paths.items()}}  # fmt: skip
    loaded = load(open_model(restate(tmp_path / "m", stated)), CPU)
    assert loaded.format == "gptq"
    del stated["extra_config"]
    with pytest.raises(LocalqError, match=r"the codes have . bits, but config.json specifies 4") as caught:
        load(open_model(restate(tmp_path / "m", stated)), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_entries_of_several_bits_in_one_model(tmp_path):
    """Of channels, where only weight_shape says which of them a matrix is in."""
    four, eight = (Int4(COMPRESSED, -1, symmetric=True, bits=bits) for bits in (4, 8))
    layers = write(tmp_path / "m", four, torch.float32, num_hidden_layers=1)
    held = load_file(tmp_path / "m" / "model.safetensors")
    out, columns = layers[DOWN][".weight_shape"].tolist()
    held |= {DOWN + suffix: each for suffix, each in tensors((out, columns), eight, torch.float32).items()}
    save_file(held, tmp_path / "m" / "model.safetensors")
    stated = compressed_config(compressed_group(four), compressed_group(eight, ("re:.*down_proj",)))
    assert load(open_model(restate(tmp_path / "m", stated)), CPU).format == COMPRESSED


DAMAGED = {
    "codes cut": (".qweight", lambda each: each[:-1], "cannot be packed|do not match|expected"),
    "zero points cut": (".qzeros", lambda each: each[:, :-1], "qzeros has shape|cannot be packed"),
    "scales cut": (".scales", lambda each: each[:, :-1].contiguous(), "shape|packed"),
    "a scale of NaN": (".scales", lambda each: each.clone().index_fill_(0, torch.tensor([1]), torch.nan), "NaN"),
    "groups of a wrong number": (".g_idx", lambda each: each + 9, "g_idx contains values"),
}


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layers_are_refused(case, bits):
    suffix, change, why = DAMAGED[case]
    of = Int4("gptq", 64, bits=bits)
    made = stored_of(of)
    made[suffix] = change(made[suffix])
    began = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        gptq.from_checkpoint(checkpoint_of(made, of.config), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert time.monotonic() - began < 1


OF_BYTES = {
    "scales cut": (".weight_scale", lambda each: each[:-1], "weight_scale has shape"),
    "zero points cut": (".weight_zero_point", lambda each: each[:-1], "weight_zero_point has shape"),
    "zero points of words": (".weight_zero_point", lambda each: each.int(), "weight_zero_point has dtype int32"),
    "scales of NaN": (".weight_scale", lambda each: each * torch.nan, "NaN"),
    "one scale": (".weight_scale", lambda each: each.flatten()[:1], "expected two dimensions"),
}


@pytest.mark.parametrize("case", OF_BYTES)
def test_damaged_bytes_are_refused(case):
    suffix, change, why = OF_BYTES[case]
    of = Int4(COMPRESSED, 64, bits=8)
    made = int_quantized(SHAPE, of, torch.float16)
    made[suffix] = change(made[suffix])
    with pytest.raises(LocalqError, match=why) as caught:
        compressed.from_checkpoint(checkpoint_of(made, {**of.config, "format": "int-quantized"}), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
