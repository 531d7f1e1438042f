"""Whole gpt-oss models, as published (MXFP4 experts) and as transformers saves them (16 bit): loaded, and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq.bench.quality import bits
from localq.engine.load import load as engine_load
from localq.engine.load import weights
from localq.engine.load.load import LoadedModel, load
from localq.engine.sampler import SamplerState
from localq.engine.step import fused_experts
from localq.engine.step.fused import FusedStep
from localq.engine.step.state import StepState
from localq.errors import ExitCode, LocalqError
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.formats import expert_linears, mxfp4, nf4
from localq.formats.linear import SlabStack
from localq.planner import footprint
from localq.planner.load_options import LoadOptions
from localq.planner.placement import Placement
from localq.quantize import by_layer, by_tensor
from localq.quantize.request import LayerwiseRequest, TensorwiseRequest
from tests.support.engine import step_stand_ins
from tests.support.engine.packed_models import packed_model
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = LoadOptions(device="cpu", dtype="float32")
IDS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))
EXPERTS = "model.layers.1.mlp.experts"
PUBLISHED_CONFIG = {  # what openai/gpt-oss-20b's config.json has in the spelling of transformers 4
    "rope_theta": 150_000,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16,
                     "rope_type": "yarn", "truncate": False},
    "experts_per_token": 2,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip


def read(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in folder.glob("*.safetensors"):
        tensors |= load_file(shard)
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with biases of the experts that are no zeros."""
    folder = make_checkpoint(tmp_path_factory.mktemp("source") / "m", "gpt_oss", shard_bytes=2**30)
    tensors = read(folder)
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith("_proj_bias")]:
        tensors[name] = torch.randn(tensors[name].shape, generator=generator).bfloat16() * 0.3
    return write(folder, tensors, json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def published(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with its experts in MXFP4, in the layout and with the configuration of openai/gpt-oss-20b."""
    tensors = read(plain)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = [mxfp4.quantize(expert.T.contiguous()) for expert in tensors.pop(name)]
        tensors[f"{name}_blocks"] = torch.stack([each.codes.unflatten(1, (-1, 16)) for each in packed])
        tensors[f"{name}_scales"] = torch.stack([each.scales for each in packed])
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters"]
    return write(tmp_path_factory.mktemp("published") / "m", tensors, {**config, **PUBLISHED_CONFIG})


def logits_of(loaded: LoadedModel, pieces: tuple[int, ...]) -> Tensor:
    """f32 [T, vocab], of passes of so many tokens."""
    parts, start = [], 0
    with torch.inference_mode():
        loaded.cache.clear()
        for count in pieces:
            stop = start + count
            positions = torch.arange(start, stop)
            parts.append(loaded.model(IDS[start:stop], positions, loaded.cache, stop, last_only=False))
            start = stop
    return torch.cat(parts)


def expected_of(folder: Path) -> Tensor:
    """Of transformers in float32, with the experts as it dequantizes them itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: Tensor = model(IDS[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("kind", ["plain", "published"])
def test_both_layouts_give_the_logits_of_transformers(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    expected = expected_of(folder)
    assert expected.std() > 0.3, "the comparison needs logits that differ"
    loaded = load(open_model(folder), CPU)
    assert loaded.format == {"plain": "bf16", "published": "mxfp4"}[kind]
    torch.testing.assert_close(logits_of(loaded, (23, 5, *(1,) * 12)), expected, rtol=0, atol=1e-4)


def test_experts_are_bit_by_bit_those_of_transformers(published: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = read(published)
    model = load(open_model(published), LoadOptions(device="cpu", dtype="bfloat16")).model
    for name in ("gate_up_proj", "down_proj"):
        blocks, scales = tensors[f"{EXPERTS}.{name}_blocks"], tensors[f"{EXPERTS}.{name}_scales"]
        ours = model.get_parameter(f"layers.1.mlp.experts.{name}")
        assert torch.equal(ours.mT, convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16))


def test_what_it_takes_is_what_is_counted(plain: Path, published: Path) -> None:
    loaded = load(open_model(published), CPU)
    assert loaded.ledger["weights"] == load(open_model(plain), CPU).ledger["weights"]  # dequantized on the CPU
    assert loaded.plan.ledger.components["kv_cache"] == loaded.ledger["kv_cache"]
    assert loaded.plan.ledger.components["weights"] == loaded.ledger["weights"]
    assert loaded.plan.ledger.components["tables"] == loaded.ledger["tables"]
    assert bits.per_weight(open_model(published)) == 4.25
    assert bits.per_weight(open_model(plain)) == 16


def test_scales_that_overflow_are_told(published: Path, tmp_path: Path) -> None:
    tensors = read(published)
    tensors[f"{EXPERTS}.down_proj_scales"][0, 0, 0] = 254  # 4 * 2 ** 127 is beyond all types
    tensors[f"{EXPERTS}.down_proj_blocks"][0, 0, 0] = 0x66
    folder = write(tmp_path, tensors, json.loads((published / "config.json").read_text()))
    assert any(f"first: {EXPERTS}.down_proj" in note for note in load(open_model(folder), CPU).notes)


@pytest.mark.parametrize(("dtype", "half"), [("float32", True), ("bfloat16", False)])
def test_too_little_host_memory_names_the_smaller_type(
    published: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, half: bool
) -> None:
    options = LoadOptions(device="cpu", dtype=dtype, ctx=64)
    needed = load(open_model(published), options).plan.ledger.total
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(LocalqError, match="is free") as caught:
        load(open_model(published), options)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert ("--dtype bfloat16" in caught.value.next_step) is half


def test_progress_counts_every_byte(published: Path) -> None:
    told: list[tuple[int, int]] = []
    load(open_model(published), CPU, lambda stage, done, total: told.append((done, total)) if total else None)
    assert told[-1][0] == told[-1][1] == sum(each.nbytes for each in read(published).values())


# ---- refused


Change = Callable[[dict[str, Tensor]], object]


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{EXPERTS}.{name}": tensor})


def nan_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{EXPERTS}.down_proj_scales"][3, 100, 2] = 255


REFUSED: dict[str, tuple[Change, str]] = {
    "no scales": (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_scales"), "lacks"),
    "no blocks": (lambda tensors: tensors.pop(f"{EXPERTS}.down_proj_blocks"), "missing"),
    "a scale that is no number": (nan_scale, "NaN"),
    "scales of other experts": (put("down_proj_scales", torch.zeros(3, 128, 6, dtype=torch.uint8)), "damaged MXFP4"),
    "blocks of a Linear": (put("down_proj_blocks", torch.zeros(128, 6, 16, dtype=torch.uint8)), "damaged MXFP4"),
    "both layouts": (put("down_proj", torch.zeros(4, 192, 128)), "another tensor both map to"),
    "a stray stack": (lambda tensors: tensors.update({f"{EXPERTS}.odd_proj_blocks": torch.zeros(4, 8, 1, 16)}), "odd"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_experts_are_refused(case: str, published: Path, tmp_path: Path) -> None:
    change, said = REFUSED[case]
    tensors = read(published)
    change(tensors)
    folder = write(tmp_path, tensors, json.loads((published / "config.json").read_text()))
    with pytest.raises(LocalqError, match=said) as caught:
        load(open_model(folder), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_experts_of_another_size_are_refused(published: Path, tmp_path: Path) -> None:
    tensors = read(published)
    for part in ("blocks", "scales"):
        tensors[f"{EXPERTS}.down_proj_{part}"] = tensors[f"{EXPERTS}.down_proj_{part}"][:, :, :5].contiguous()
    folder = write(tmp_path, tensors, json.loads((published / "config.json").read_text()))
    with pytest.raises(LocalqError, match=r"\[4, 128, 160\], not \[4, 128, 192\]") as caught:
        load(open_model(folder), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE


# ---- as on a GPU


@pytest.fixture(scope="module")
def packed(published: Path) -> tuple[Any, list[int]]:
    """The published layout as a GPU holds it, on the CPU; and the bytes of each tensor that were planned."""
    model, sizes, _ = packed_model(open_model(published))
    return model, sizes


def test_packed_experts_take_the_bytes_of_the_file_and_give_the_same_logits(
    packed: tuple[Any, list[int]], published: Path
) -> None:
    model, sizes = packed
    stacks = [module for module in model.modules() if isinstance(module, SlabStack)]
    tensors = read(published)
    assert len(stacks) == 2 * model.config.layers
    assert sum(sizes) == weights.weight_bytes(model)["weights"]
    in_file = sum(each.nbytes for name, each in tensors.items() if name.endswith(("_blocks", "_scales")))
    assert sum(sum(buffer.nbytes for buffer in stack.buffers()) for stack in stacks) == in_file
    plain = load(open_model(published), CPU)
    expected = logits_of(plain, (23, 17))
    torch.testing.assert_close(logits_of(replace(plain, model=model), (23, 17)), expected, rtol=0, atol=1e-4)


def test_an_expert_is_dequantized_into_the_shared_scratch(packed: tuple[Any, list[int]]) -> None:
    model, _ = packed
    count = engine_load.share_scratch(model, torch.float32)
    assert count == 4 * 2 * model.config.expert_width * model.config.hidden  # gate and up of one expert
    stack = model.layers[1].mlp.experts.gate_up_proj
    x, bias = torch.randn(3, model.config.hidden), torch.randn(2 * model.config.expert_width)
    expected = stack.product(x, 2, bias)
    assert stack.tall.scratch.any()
    stack.tall.scratch = torch.zeros(count // 7, dtype=torch.uint8)  # slabs of some rows
    torch.testing.assert_close(stack.product(x, 2, bias), expected)
    stack.tall.scratch = None


def test_the_kernels_are_given_the_tensors_of_the_file(packed: tuple[Any, list[int]], published: Path) -> None:
    model, _ = packed
    tensors, experts = read(published), model.layers[1].mlp.experts
    for name, part in (("gate_up_proj", experts.gate_up_proj), ("down_proj", experts.down_proj)):
        stack = expert_linears.stack_of(part)
        assert torch.equal(stack.blocks, tensors[f"{EXPERTS}.{name}_blocks"])
        assert torch.equal(stack.scales, tensors[f"{EXPERTS}.{name}_scales"])
    assert fused_experts.why_not(model.layers[1].mlp, torch.bfloat16) == ""


def test_inputs_of_experts_that_shared_memory_has_no_room_for_take_no_kernels(
    packed: tuple[Any, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = packed
    monkeypatch.setattr("localq.formats.experts.kernel.WIDEST", 384)
    mixture, width = model.layers[1].mlp, model.config.expert_width
    why = fused_experts.why_not(mixture, torch.bfloat16)
    assert why == f"{mixture.router.active} experts with {width} columns each do not fit in any kernel's input buffer"


def test_a_step_of_launches_over_packed_experts_gives_the_same_logits(
    packed: tuple[Any, list[int]], published: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_stand_ins.install(monkeypatch)
    plain, (model, _) = load(open_model(published), CPU), packed
    expected = logits_of(plain, (23, 17))
    loaded, rows = replace(plain, model=model), []
    logits_of(loaded, (23,))
    cpu = torch.device("cpu")
    with torch.inference_mode():
        step = FusedStep(model, loaded.cache, StepState(SamplerState(loaded.vocab, loaded.ctx, cpu), cpu))
        for position in range(23, 40):
            step.state.token.copy_(IDS[position : position + 1])
            step.state.position.fill_(position)
            step.run(greedy=True)
            rows.append(step.logits[0].clone())
    torch.testing.assert_close(torch.stack(rows), expected[23:], rtol=0, atol=2e-4)
    config = model.config
    buffers = config.experts_active * config.expert_width + 2 * config.hidden + config.vocab_size
    buffers += (2 * config.heads + 2 * config.kv_heads) * config.head_dim
    assert step.bytes() == 4 * buffers + 8 * config.experts_active + 4 * (config.experts + 1)
    arch = Architecture.from_config(open_model(published).config)
    assert step.bytes() == footprint.fixed_bytes(arch, "mxfp4", "", None, Placement(), 4)["step_buffers"]


# ---- made of it


def test_nf4_takes_all_but_the_experts(plain: Path, tmp_path: Path) -> None:
    made = by_tensor.convert(TensorwiseRequest(open_model(plain), "nf4", tmp_path / "nf4"))
    loaded = load(open_model(made), CPU)
    assert loaded.format == "nf4"
    original = load(open_model(plain), CPU)
    for name, tensor in original.model.named_parameters():
        quantized = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
        assert torch.equal(loaded.model.get_parameter(name), tensor) is not quantized, name


def test_nf4_of_the_published_layout_leaves_its_experts_as_they_are(published: Path, tmp_path: Path) -> None:
    made = open_model(by_tensor.convert(TensorwiseRequest(open_model(published), "nf4", tmp_path / "nf4")))
    before, after = read(published), read(made.path)
    copied = {name for name in before if name.endswith(("_blocks", "_scales", "_bias", "router.weight", "sinks"))}
    assert len(copied) == 3 * 8
    assert all(torch.equal(before[name], after[name]) for name in copied)
    loaded = load(made, CPU)
    assert loaded.format == "nf4"
    for name, tensor in load(open_model(published), CPU).model.named_parameters():
        in_nf4 = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"))
        expected = nf4.dequantize(nf4.quantize(tensor.bfloat16()), torch.float32) if in_nf4 else tensor
        assert torch.equal(loaded.model.get_parameter(name), expected), name
    model, sizes, _ = packed_model(made)
    kinds = [type(module) for module in model.modules() if isinstance(module, nf4.Linear | SlabStack)]
    assert [kinds.count(kind) for kind in (nf4.Linear, SlabStack)] == [12, 6]
    arch = Architecture.from_config(made.config)
    maps = 12 * (4 * 272 - 4)  # of NF4, which its Linears share; each has an offset instead
    wide = 2 * arch.other_parameters  # in f32 here
    assert sum(sizes) == footprint.weights_bytes(arch, "nf4")["weights"] + wide - maps


def test_two_bits_are_not_made_of_it(plain: Path, tmp_path: Path) -> None:
    request = LayerwiseRequest(open_model(plain), tmp_path / "vq2", [list(range(64))], torch.device("cpu"))
    with pytest.raises(LocalqError, match="biases and interleaved gate/up rows") as caught:
        by_layer.convert(request)
    assert caught.value.exit_code == ExitCode.USAGE
    assert not (tmp_path / "vq2").exists()
