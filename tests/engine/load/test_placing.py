"""Weights in one allocation: every tensor has its place, and no byte is left over."""

from __future__ import annotations

import json

import pytest
import torch

from localq.engine.arena import ALIGNMENT, Arena, arena_bytes
from localq.engine.load import weights
from localq.engine.load.load import load
from localq.engine.load.placing import Destinations
from localq.files.model_folder import open_model
from localq.formats import int8, nf4
from localq.formats.checkpoint import Checkpoint, info
from localq.formats.nf4 import codec as nf4_codec
from localq.formats.nf4 import linear as nf4_linear
from localq.formats.nf4 import tiles as nf4_tiles
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner.load_options import LoadOptions
from localq.planner.placement import Placement
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import prompt_of
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = torch.device("cpu")


def test_tensors_are_copied_to_aligned_places_until_nothing_is_left():
    tensors = [torch.randn(3, 5), torch.arange(7), torch.empty(0, 4), torch.ones(300, dtype=torch.float16)]
    arena = Arena(arena_bytes([each.nbytes for each in tensors]), CPU)
    placed = [arena.copy(each) for each in tensors]
    for copy, original in zip(placed, tensors, strict=True):
        assert copy.dtype == original.dtype
        assert torch.equal(copy, original)
        assert copy.data_ptr() != original.data_ptr() or not copy.numel()
    assert {copy.untyped_storage().data_ptr() for copy in placed} == {placed[0].untyped_storage().data_ptr()}
    assert all((copy.data_ptr() - placed[0].data_ptr()) % ALIGNMENT == 0 for copy in placed if copy.numel())
    with pytest.raises(ValueError, match="0 bytes are left, 1 are needed"):
        arena.empty((1,), torch.int8)


def test_tiling_some_rows_at_a_time_is_tiling(monkeypatch):
    packed = nf4.quantize(torch.randn(16 * 9 + 5, 640))
    codes, absmax = nf4_tiles.tile(packed.codes, packed.absmax, packed.shape)
    monkeypatch.setattr(nf4_linear, "TILED_AT_A_TIME", 2 * 16 * 640 + 1)  # two tiles
    linear = nf4.Linear(packed.placed(torch.clone, CPU)).tile_()
    assert torch.equal(linear.codes, codes)
    assert torch.equal(linear.absmax, absmax)
    assert torch.equal(linear.packed.codes, packed.codes)


@pytest.mark.parametrize("device", [None, CPU])
def test_quantizing_elsewhere_is_quantizing(monkeypatch, device):
    weight = torch.randn(40, 128)
    expected = nf4.quantize(weight), int8.quantize(weight)
    monkeypatch.setitem(nf4_codec.CHUNK_ELEMENTS, "cpu", 3 * 128)
    monkeypatch.setattr(int8, "ELEMENTS_AT_A_TIME", 3 * 128)
    assert torch.equal(nf4.quantize(weight, device).codes, expected[0].codes)
    assert torch.equal(int8.quantize(weight, device).codes, expected[1].codes)
    assert torch.equal(int8.quantize(weight, device).scales, expected[1].scales)


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])  # qwen2 has biases
@pytest.mark.parametrize("nested", [True, False])
def test_the_arena_holds_the_blocks_exactly(tmp_path, model_type, nested):
    source = make_checkpoint(tmp_path / "source", model_type, dtype=torch.float32, initializer_range=0.15)
    convert(TensorwiseRequest(open_model(source), "nf4", tmp_path / "nf4"))
    files = open_model(tmp_path / "nf4")
    expected = load(files, LoadOptions(device="cpu", dtype="float32"))
    family = architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    with open_checkpoint(files) as checkpoint:
        if not nested:
            checkpoint = unnested(checkpoint)
        assignment = weights.assign(checkpoint, model, family.rename, "model")
        sizes = weights.block_sizes(assignment, checkpoint, model, torch.float32, packed=True)
        places = Destinations(CPU, torch.float32, Placement(), sizes)
        places.packed = True  # as on a GPU
        weights.fill(model, assignment, checkpoint, places, lambda done, total: None)
    with pytest.raises(ValueError, match="0 bytes are left"):
        places.block(torch.ones(1))
    taken = weights.weight_bytes(model)["weights"]
    assert sum(sizes) <= taken <= sum(sizes) + 2048  # and the maps, once
    model.make_tables(64, CPU)
    got, wanted = (logits(each, expected.cache) for each in (model, expected.model))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def unnested(checkpoint: Checkpoint) -> Checkpoint:
    """The same values without double quantization."""
    tensors, made = dict(checkpoint.tensors), {}
    for name in list(tensors):
        prefix = name.removesuffix(nf4.STATE_SUFFIX)
        if prefix == name:
            continue
        packed = nf4.from_checkpoint(checkpoint, prefix)
        state = json.loads(checkpoint.read(name).numpy().tobytes())
        state = {key: value for key, value in state.items() if not key.startswith("nested")}
        made[name] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
        made[f"{prefix}.weight.absmax"] = nf4.absmax_f32(packed).reshape(-1)
        for suffix in (".weight.nested_absmax", ".weight.nested_quant_map"):
            del tensors[prefix + suffix]
    tensors |= {name: info(tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}

    class Changed:
        def read(self, name):
            return made[name] if name in made else checkpoint.read(name)

        def close(self):
            pass

    return Checkpoint(tensors, Changed())


def logits(model, cache) -> torch.Tensor:
    cache.clear()
    ids = torch.tensor(prompt_of(30))
    with torch.inference_mode():
        return model(ids, torch.arange(30), cache, 30, last_only=False)
