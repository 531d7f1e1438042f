"""Mixtures whose experts are Linears, as a GPU holds them, and the decode step of those in AQLM and vq2: on the CPU.

Weights are dequantized by the definition, once for the whole model and once matrix by matrix.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq.bench.quality import bits
from localq.engine.arena import arena_bytes
from localq.engine.load import expert_pieces, weights
from localq.engine.load.load import load
from localq.engine.load.shared import SharedTensors
from localq.engine.step import fused_experts
from localq.files import format_facts, format_sizes, stored_format
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.formats import FORMATS as FORMAT_MODULES
from localq.formats import expert_linears
from localq.formats.codebooks import lookup_kernel, vq2
from localq.formats.codebooks.experts_kernel import vq_stack
from localq.formats.codebooks.linear import VqLinear
from localq.formats.expert_linears import LinearStack
from localq.formats.int4.eight_bits import Int8Linear
from localq.formats.int4.linear import Int4Linear
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.models.experts import Mixture
from localq.planner import footprint, slabs
from localq.planner.load_options import LoadOptions
from localq.planner.placement import Placement
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine import step_stand_ins
from tests.support.engine.engine_runs import logits_of
from tests.support.engine.fused_steps import logits_of_launches, operations
from tests.support.engine.live_memory import LiveMemory
from tests.support.engine.packed_models import packed_model
from tests.support.formats.expert_checkpoints import quantized, read, source, write
from tests.support.models import tiny_models
from tests.support.models.tiny_checkpoints import TINY
from tests.support.models.tiny_models import PREFILL

IDS = torch.randint(0, 256, (21,), generator=torch.Generator().manual_seed(1)).tolist()
FORMATS = ("aqlm", "vq2")
every_format = pytest.mark.parametrize("format", FORMATS)


def in_vq2(folder: Path, like: Path) -> Path:
    """The mixtral of `like` with experts of random codes: gate and up share a codebook, down is rotated."""
    generator, held = torch.Generator().manual_seed(2), read(like)

    def part(name: str, weight: torch.Tensor, home: str | None, signs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        out, columns = weight.shape
        codes = torch.randint(256, (out, columns // 4), dtype=torch.uint8, generator=generator)
        codebook = (torch.randn(256, 16, generator=generator) / (2 * columns**0.5)).half()
        scales = 0.5 + torch.rand(out, generator=generator).half()
        made = vq2.to_tensors(vq2.Packed(((codes, codebook),), scales, signs, (out, columns)), name, home)
        return {key: each for key, each in made.items() if not key.endswith("w3.codebook")}

    for name in sorted(held):
        if ".experts." in name:
            weight, prefix = held.pop(name), name.removesuffix(".weight")
            home, leaf = prefix.rsplit(".", 1)
            signs = torch.arange(7, 7 + weight.shape[1] // 8, dtype=torch.uint8) if leaf == "w2" else None
            held |= part(prefix, weight, None if leaf == "w2" else home, signs)
    return write(folder, held, like, quantization_config=vq2.quantization_config("bfloat16", []))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("mixtures")
    plain = source(place / "plain", "mixtral")
    keep = lambda name: ".experts." not in name  # noqa: E731
    aqlm = quantized(place / "aqlm", plain, "aqlm 2x8g8", keep=keep)[0]
    long = quantized(place / "long", plain, "aqlm 1x16g8", keep=keep)[0]
    return {"aqlm": aqlm, "1x16": long, "vq2": in_vq2(place / "vq2", plain)}


def mixtures(model) -> list[Mixture]:
    return [block.mlp for block in model.layers]


def put_into_tiles(model) -> None:
    """What a GPU's kernels read."""
    for module in model.modules():
        if isinstance(module, VqLinear):
            module.put_into_tiles()
    for mixture in mixtures(model):
        for stack in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
            stack.stack = vq_stack([[each.tiles for each in some] for some in stack.parts])


@every_format
def test_experts_stay_as_they_are_stored_and_compute_what_they_stand_for(format, folders):
    files = open_model(folders[format])
    exact = load(files, LoadOptions(device="cpu", dtype="float32"))
    assert exact.format == format
    model, sizes, places = packed_model(files)
    assert places._arena is not None
    assert places._arena._used == arena_bytes(sizes), "as planned, to the byte"
    experts = mixtures(model)[1].experts
    assert isinstance(experts.gate_up_proj, LinearStack)
    for index in range(experts.count):
        for name in ("gate_up_proj", "down_proj"):
            dense, x = getattr(mixtures(exact.model)[1].experts, name)[index], torch.randn(3, 192)
            x = x[:, : dense.shape[1]]
            torch.testing.assert_close(getattr(experts, name).product(x, index, None), x @ dense.T, rtol=0, atol=1e-4)
    got, expected = (logits_of(each, exact, IDS) for each in (model, exact.model))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    stored = sum(each.nbytes for name, each in read(folders[format]).items() if ".experts." in name)
    weights = 2 * 4 * 3 * 128 * 192
    assert bits.per_weight(files) == pytest.approx(8 * stored / weights)


@every_format
def test_experts_are_placed_one_matrix_after_the_other(format, folders):
    files = open_model(folders[format])
    family = architecture(files.config)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    with open_checkpoint(files) as checkpoint:
        stack = weights.assign(checkpoint, model, family.rename, "m").stacks["layers.1.mlp.experts.gate_up_proj"]
        shared = sum(checkpoint.tensors[key].nbytes for key in stack.shared)
        placed = sum(stack.placed_bytes(checkpoint)) + shared
        with LiveMemory() as memory:
            held = stack.linears(SharedTensors(checkpoint, stack.shared), torch.clone, torch.device("cpu"))
        assert len(held) * len(held[0]) == 8
        one = placed // 8
        assert placed <= memory.peak <= placed + shared + 2 * one  # shared ones are kept until all is loaded


@pytest.fixture
def stand_ins(monkeypatch):
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(lookup_kernel, "vq_gemv", step_stand_ins.vq_gemv)


@every_format
def test_launches_read_the_experts_that_the_router_chose(format, folders, stand_ins):
    """The indices stay in tensors: a step is the same list of launches whatever is chosen."""
    model, _, _ = packed_model(open_model(folders[format]))
    put_into_tiles(model)
    with torch.inference_mode():
        logits = logits_of_launches(model)
        expected = tiny_models.logits_in_steps(model)[sum(PREFILL) :]
    # AQLM rounds sums and products to f16 by its definition, which the kernels' weights are not.
    assert (logits - expected).norm() <= {"aqlm": 2**-9, "vq2": 1e-5}[format] * expected.norm()
    layer = ["qkv", "attention", "o", "router", "gate_up", "down"]
    assert operations(model) == ["embed", *layer * 2, "head", "sample"]


@every_format
def test_the_planner_knows_tables_of_experts_to_the_byte(format, folders):
    files = open_model(folders[format])
    model, _, _ = packed_model(files)
    put_into_tiles(model)
    arch, scheme = Architecture.from_config(files.config), {"aqlm": "2x8g8", "vq2": "s4l16"}[format]
    with open_checkpoint(files) as checkpoint:
        assert stored_format.scheme_in(files, {name: each.shape for name, each in checkpoint.tensors.items()}) == scheme
    fragments = {book.fragments.data_ptr(): book.fragments.nbytes for module in model.modules()
                 if isinstance(module, VqLinear) for book in module.tiles.books}  # fmt: skip
    made = sum(fragments.values()) + expert_linears.table_bytes(model)
    assert sum(format_sizes.expert_tables(each, format, scheme) for each in arch.linears if each.expert) == made


def test_the_planner_knows_tables_of_dense_matrices_of_aqlm():
    """As its ledger has counted them since they have a kernel."""
    arch = Architecture.from_config({**TINY, "model_type": "llama"})
    fixed = footprint.fixed_bytes(arch, "aqlm", "2x8g8", None, Placement(), 2)
    assert fixed["tables"] == format_sizes.WORKSPACE_BYTES + 2 * format_sizes.FRAGMENT_BYTES * 7 * arch.layers
    assert footprint.fixed_bytes(arch, "aqlm", "1x16g8", None, Placement(), 2)["tables"] == 0


def test_why_a_step_has_no_kernel(folders):
    model, _, _ = packed_model(open_model(folders["1x16"]))
    assert fused_experts.why_not(mixtures(model)[0], torch.float16) == "no kernel supports experts in this format"
    model, _, _ = packed_model(open_model(folders["vq2"]))
    put_into_tiles(model)
    mixture = mixtures(model)[0].to(torch.float16)
    assert fused_experts.why_not(mixture, torch.float16) == ""
    mixture.experts.down_proj.parts[2][0].signs ^= 1
    assert "a separate rotation to each expert's input" in fused_experts.why_not(mixture, torch.float16)
    mixture.experts.gate_up_proj.parts[0][0].signs = torch.zeros(16, dtype=torch.uint8)
    assert "the inputs of the experts' gate and up matrices" in fused_experts.why_not(mixture, torch.float16)


def test_experts_of_two_layouts_have_no_kernel_and_still_compute(folders):
    model, _, _ = packed_model(open_model(folders["aqlm"]))
    put_into_tiles(model)
    first, other = (mixtures(model)[0].experts.gate_up_proj, mixtures(model)[0].experts.down_proj)
    mixed = LinearStack([list(first.parts[0])[:1], list(other.parts[0])])
    assert mixed.stack is None


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Formats without kernels for experts."""
    place = tmp_path_factory.mktemp("others")
    plain = source(place / "plain", "qwen3_moe")
    published = ("awq", "gptq", "compressed-tensors", "gguf", "nvfp4", "fp8")
    made = {format: quantized(place / format, plain, format)[0] for format in published}
    return made | {
        each: by_tensor.convert(TensorwiseRequest(open_model(plain), each, place / each))
        for each in ("bcq", "squeezellm")
    }


@pytest.mark.parametrize("format", sorted(set(expert_pieces.LINEARS) - {*FORMATS, "vptq"}))
def test_experts_of_every_other_format_lie_on_a_gpu_as_they_are_stored(format, others):
    """AWQ, GPTQ and the rest: one Linear after the other, in memory that was counted before, with the same logits."""
    files = open_model(others[format])
    exact = load(files, LoadOptions(device="cpu", dtype="float32"))
    model, sizes, places = packed_model(files)
    assert places._arena is not None
    assert places._arena._used == arena_bytes(sizes), "as planned, to the byte"
    assert weights.weight_bytes(model)["weights"] <= sum(sizes)
    mixture = next(each for each in mixtures(model) if isinstance(each, Mixture))
    stack = mixture.experts.gate_up_proj
    assert isinstance(stack, LinearStack)
    linear = FORMAT_MODULES[format].Linear
    of_format = linear if isinstance(linear, type) else (Int4Linear, Int8Linear)
    assert all(isinstance(each, of_format) for each in stack.linears)
    got, expected = (logits_of(each, exact, IDS) for each in (model, exact.model))
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    assert fused_experts.why_not(mixture, torch.float16) == "no kernel supports experts in this format"
    arch = Architecture.from_config(files.config)
    together = slabs.slab_bytes(max(each.slab_weights for each in stack.linears), 2)
    opened = next(each for each in arch.linears if each.expert and each.name == "gate, up")
    assert together == 2 * slabs.slab_weights(opened, format_facts.of(format))


def test_of_mixtures_all_formats_but_two_are_linears():
    joined = {name for name, module in FORMAT_MODULES.items() if hasattr(module, "join")}
    assert {*expert_pieces.LINEARS, *joined} == FORMAT_MODULES.keys()
    assert joined == {name for name, each in format_facts.FORMATS.items() if each.stacks_experts}
