"""Whole mixtures as they are published, a matrix for each expert, and as transformers 5 holds them: loaded, refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from localq.bench.quality import bits
from localq.engine.cache import KVCache
from localq.engine.load import expert_pieces, weights
from localq.engine.load.load import LoadedModel, load
from localq.engine.step import fused_experts
from localq.errors import ExitCode, LocalqError
from localq.files.hub import remote as hub_remote
from localq.files.model_folder import open_model
from localq.formats import mxfp4, nf4
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from localq.models.experts import Router
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import logits_of
from tests.support.engine.live_memory import LiveMemory
from tests.support.engine.packed_models import packed_model
from tests.support.formats.expert_checkpoints import FORMATS, fused, logits, quantized, read, source, write
from tests.support.quantize.conversions import digests

KINDS = ("mixtral", "qwen3_moe")
CPU = LoadOptions(device="cpu", dtype="float32")
IDS = tuple(torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist())
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixtures")
    return {kind: source(folder / kind, kind) for kind in KINDS}


def model_of(folder: Path) -> tuple[weights.Assignment, object]:
    files = open_model(folder)
    architecture = ARCHITECTURES[files.config["model_type"]]
    with torch.device("meta"):
        model = architecture.Model(architecture.Config.from_dict(files.config))
    checkpoint = open_checkpoint(files)
    return weights.assign(checkpoint, model, architecture.rename, "m"), checkpoint


def in_steps(loaded: LoadedModel) -> Tensor:
    """f32 [T, vocab] of a prompt in two pieces and cached steps."""
    cache = KVCache(loaded.model.cache_layout(), loaded.ctx, loaded.dtype, "cpu")
    parts, start = [], 0
    with torch.inference_mode():
        for count in (23, 5, *(1,) * 12):
            stop = start + count
            ids, positions = torch.tensor(IDS[start:stop]), torch.arange(start, stop)
            parts.append(loaded.model(ids, positions, cache, stop, last_only=False))
            start = stop
    return torch.cat(parts)


@every_kind
def test_experts_one_by_one_and_as_a_whole_give_the_logits_of_transformers(kind, sources, tmp_path):
    expected = logits(sources[kind], IDS)
    assert expected.std() > 0.5, "the comparison needs logits that differ"
    for folder in (sources[kind], fused(tmp_path / "fused", sources[kind])):
        loaded = load(open_model(folder), CPU)
        assert loaded.format == "bf16"
        torch.testing.assert_close(in_steps(loaded), expected, rtol=0, atol=1e-4)
        assert loaded.plan.ledger.components["weights"] == loaded.ledger["weights"]
        assert bits.per_weight(open_model(folder)) == 16


@every_kind
@pytest.mark.parametrize("format", FORMATS)
def test_quantized_experts_give_the_logits_of_their_dequantized_weights(format, kind, sources, tmp_path):
    packed, plain = quantized(tmp_path, sources[kind], format, routers=format == "nf4")
    told: list[tuple[int, int]] = []
    loaded = load(open_model(packed), CPU, lambda stage, done, total: told.append((done, total)) if total else None)
    assert loaded.format == format.split()[0]
    stored = sum(each.nbytes for name, each in read(packed).items() if not name.endswith(".bias"))  # they are idle
    assert told[-1] == (stored, stored) or format == "fp8"  # which the CPU has as 16-bit weights
    torch.testing.assert_close(in_steps(loaded), logits(plain, IDS), rtol=0, atol=1e-4)


@every_kind
def test_some_experts_may_stay_unquantized(kind, sources, tmp_path):
    packed, plain = quantized(tmp_path, sources[kind], "nf4", keep=lambda name: ".experts.1." in name)
    loaded = load(open_model(packed), CPU)
    torch.testing.assert_close(in_steps(loaded), logits(plain, IDS), rtol=0, atol=1e-4)
    assignment, _ = model_of(packed)
    assert {stack.format for stack in assignment.stacks.values()} == {None}  # so on a GPU they are 16 bit


# ---- as rows of one matrix, as a GPU has them


@every_kind
@pytest.mark.parametrize("format", ["nf4", "nf4 plain"])
def test_the_tall_matrix_has_the_weights_of_every_expert_bit_by_bit(format, kind, sources, tmp_path):
    packed, _ = quantized(tmp_path, sources[kind], format)
    assignment, checkpoint = model_of(packed)
    assert assignment.stacks
    for stack in assignment.stacks.values():
        assert stack.format == "nf4"
        experts, out, columns = stack.shape(checkpoint)
        tall = stack.tall(checkpoint)
        assert [tall.codes.nbytes, tall.absmax.nbytes] == stack.placed_bytes(checkpoint)
        dense = nf4.dequantize(tall, torch.float32).view(experts, out, columns)
        assert torch.equal(dense, stack.read(checkpoint, torch.float32))


@every_kind
def test_headers_tell_what_experts_take_in_memory(kind, sources, tmp_path):
    packed, _ = quantized(tmp_path, sources[kind], "nf4")
    assignment, checkpoint = model_of(packed)
    experts = sum(sum(stack.placed_bytes(checkpoint)) for stack in assignment.stacks.values())
    inside, told = (".weight", ".weight.absmax"), hub_remote.block_bytes(packed)
    besides = sum(each.nbytes for name, each in read(packed).items()
                  if not (".experts." in name and name.endswith(inside)) and "embed_tokens" not in name
                  and name != "lm_head.weight")  # fmt: skip
    assert told == experts + besides


def test_a_quantized_router_is_dequantized_where_matrices_stay_packed(sources, tmp_path):
    """As on a GPU: it is read in f32 there."""
    packed, _ = quantized(tmp_path, sources["mixtral"], "nf4", routers=True)
    model, sizes, _ = packed_model(open_model(packed))
    assert sum(sizes) >= weights.weight_bytes(model)["weights"] - nf4.dynamic_map().nbytes - nf4.CODE_MAP.nbytes
    mixture = model.layers[0].mlp
    assert isinstance(mixture.router, Router)
    exact = load(open_model(packed), CPU).model.layers[0].mlp
    assert torch.equal(mixture.router.weight, exact.router.weight)
    for part in ("gate_up_proj", "down_proj"):
        stack, dense = getattr(mixture.experts, part), getattr(exact.experts, part)
        assert torch.equal(nf4.dequantize(stack.tall.packed, torch.float32).view_as(dense), dense)
    assert fused_experts.why_not(mixture, torch.float16) == ""


def test_a_stack_is_filled_beside_one_matrix(sources):
    assignment, checkpoint = model_of(sources["mixtral"])
    stack = assignment.stacks["layers.0.mlp.experts.gate_up_proj"]
    _, out, columns = stack.shape(checkpoint)
    made = 4 * 4 * out * columns
    with LiveMemory() as memory:
        stack.read(checkpoint, torch.float32)
    assert made <= memory.peak <= made + 4 * out * columns


# ---- refused


Change = Callable[[dict[str, Tensor], str], object]
FIRST = {"mixtral": "model.layers.0.block_sparse_moe.experts", "qwen3_moe": "model.layers.0.mlp.experts"}
GATE = {"mixtral": "w1", "qwen3_moe": "gate_proj"}


def put(name: str, tensor: Tensor) -> Change:
    return lambda held, kind: held.update({f"{FIRST[kind]}.{name.replace('GATE', GATE[kind])}": tensor})


def drop(name: str) -> Change:
    return lambda held, kind: held.pop(f"{FIRST[kind]}.{name.replace('GATE', GATE[kind])}")


def drop_last(held: dict[str, Tensor], kind: str) -> None:
    last = 3 if kind == "mixtral" else 4
    for name in [name for name in held if name.startswith(f"{FIRST[kind]}.{last}.")]:
        del held[name]


REFUSED: dict[str, tuple[Change, str]] = {
    "one matrix missing": (drop("2.GATE.weight"), "missing gate_proj of expert 2"),
    "the last expert missing": (drop_last, r"has shape \[\d, "),
    "an expert too many": (put("9.GATE.weight", torch.zeros(64, 128)), "of expert"),
    "an expert of a large number": (put("99999999999.GATE.weight", torch.zeros(64, 128)), "do not belong to this arch"),
    "a number with a zero": (put("01.GATE.weight", torch.zeros(64, 128)), "do not belong to this arch"),
    "another size": (put("1.GATE.weight", torch.zeros(64, 64)), "but expert 0 has shape"),
    "no matrix": (put("1.GATE.weight", torch.zeros(64)), "not a matrix"),
    "an empty matrix": (put("1.GATE.weight", torch.zeros(0, 128)), "not a matrix"),
    "integers": (put("1.GATE.weight", torch.zeros(64, 128, dtype=torch.int32)), "unsupported dtype int32"),
    "a bias": (put("1.GATE.bias", torch.zeros(64)), "do not belong to this arch"),
    "both layouts": (
        lambda held, kind: held.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 128, 192)}),
        "another tensor both map to",
    ),
}


@every_kind
@pytest.mark.parametrize("case", REFUSED)
def test_experts_that_do_not_belong_together_are_refused(case, kind, sources, tmp_path):
    change, said = REFUSED[case]
    held = read(sources[kind])
    change(held, kind)
    refused(write(tmp_path, held, sources[kind]), said)


DAMAGED: dict[str, tuple[Callable[[dict[str, Tensor], str], object], str]] = {
    "no scales": (lambda held, name: held.pop(f"{name}.absmax"), "lacks"),
    "no state": (lambda held, name: held.pop(f"{name}.quant_state.bitsandbytes__nf4"), "shape|do not belong"),
    "codes cut": (lambda held, name: held.update({name: held[name][:-1]}), "bytes of codes"),
    "a state of another shape": (
        lambda held, name: held.update(
            {f"{name}.quant_state.bitsandbytes__nf4": held[f"{name}.quant_state.bitsandbytes__nf4"][:-3]}
        ),
        "quant_state",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_nf4_experts_are_refused(case, sources, tmp_path):
    change, said = DAMAGED[case]
    packed, _ = quantized(tmp_path / "whole", sources["qwen3_moe"], "nf4")
    held = read(packed)
    change(held, f"{FIRST['qwen3_moe']}.3.up_proj.weight")
    refused(write(tmp_path / "damaged", held, packed), said)


def refused(folder: Path, said: str) -> None:
    began = time.process_time()
    with pytest.raises(LocalqError, match=said) as caught:
        load(open_model(folder), CPU)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert time.process_time() - began < 1


def test_experts_one_by_one_are_no_part_of_an_interleaved_mixture(sources):
    """gpt-oss has gate and up in turn: joined one behind the other they would be wrong without a word."""
    architecture = ARCHITECTURES["gpt_oss"]
    config = {**open_model(sources["mixtral"]).config, "model_type": "gpt_oss", "sliding_window": 16}
    with torch.device("meta"):
        model = architecture.Model(architecture.Config.from_dict(config))
    checkpoint = open_checkpoint(open_model(sources["qwen3_moe"]))
    assert expert_pieces.find(checkpoint, architecture.rename, model) == {}


def test_a_reply_of_a_mixture_is_that_of_one_pass(sources):
    loaded = load(open_model(sources["qwen3_moe"]), CPU)
    torch.testing.assert_close(logits_of(loaded.model, loaded, list(IDS)), in_steps(loaded), rtol=0, atol=1e-4)


# ---- made of it


@every_kind
def test_nf4_takes_every_expert_apart_as_bitsandbytes_would(kind, sources, tmp_path):
    from_matrices = by_tensor.convert(TensorwiseRequest(open_model(sources[kind]), "nf4", tmp_path / "matrices"))
    from_stacks = by_tensor.convert(
        TensorwiseRequest(open_model(fused(tmp_path / "fused", sources[kind])), "nf4", tmp_path / "stacks")
    )
    theirs = read(quantized(tmp_path / "bnb", sources[kind], "nf4")[0])
    ours, again = read(from_matrices), read(from_stacks)
    assert ours.keys() == again.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, again[name]), name
        if name.endswith(".weight") and tensor.dtype == torch.uint8:
            assert torch.equal(tensor.view(-1), theirs[name].view(-1)), name
    skipped = json.loads((from_stacks / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert f"layers.0.{'mlp' if kind == 'qwen3_moe' else 'block_sparse_moe'}.gate" in skipped
    loaded = load(open_model(from_stacks), CPU)
    assert loaded.format == "nf4"
    torch.testing.assert_close(in_steps(loaded), in_steps(load(open_model(from_matrices), CPU)), rtol=0, atol=0)


def test_mxfp4_of_a_mixture_loads_and_lies_in_one_matrix(sources, tmp_path):
    made = by_tensor.convert(TensorwiseRequest(open_model(sources["qwen3_moe"]), "mxfp4", tmp_path / "m"))
    assert load(open_model(made), CPU).format == "mxfp4"
    assignment, checkpoint = model_of(made)
    stack = assignment.stacks["layers.0.mlp.experts.down_proj"]
    tall = stack.tall(checkpoint)
    assert [tall.codes.nbytes, tall.scales.nbytes] == stack.placed_bytes(checkpoint)
    dense = mxfp4.dequantize(tall, torch.float32).view(stack.shape(checkpoint))
    assert torch.equal(dense, stack.read(checkpoint, torch.float32))


def test_experts_that_a_format_cannot_take_stay_and_are_told(tmp_path):
    narrow = source(tmp_path / "m", "qwen3_moe", moe_intermediate_size=40)  # down_proj has rows of 40
    told: list[str] = []
    made = by_tensor.convert(
        TensorwiseRequest(open_model(fused(tmp_path / "fused", narrow)), "nf4", tmp_path / "nf4"), say=told.append
    )
    assert len(told) == 1
    assert "1 matrices are left unquantized" in told[0]
    torch.testing.assert_close(load(open_model(made), CPU).model.layers[0].mlp.experts.down_proj,
                               load(open_model(narrow), CPU).model.layers[0].mlp.experts.down_proj)  # fmt: skip


def test_a_kill_while_experts_are_taken_apart_loses_one_shard(sources, tmp_path, monkeypatch):
    whole = by_tensor.convert(
        TensorwiseRequest(
            open_model(fused(tmp_path / "f", sources["mixtral"])), "nf4", tmp_path / "whole", shard_bytes=60_000
        )
    )
    made = 0

    def killed(weight: Tensor) -> nf4.Packed:
        nonlocal made
        made += 1
        if made == 11:
            raise KeyboardInterrupt
        return nf4.quantize(weight)

    monkeypatch.setattr(by_tensor, "FORMATS", {"nf4": Killed(killed)})
    with pytest.raises(KeyboardInterrupt):
        by_tensor.convert(TensorwiseRequest(open_model(tmp_path / "f"), "nf4", tmp_path / "cut", shard_bytes=60_000))
    monkeypatch.undo()
    assert digests(
        by_tensor.convert(TensorwiseRequest(open_model(tmp_path / "f"), "nf4", tmp_path / "cut", shard_bytes=60_000))
    ) == digests(whole)


class Killed:
    """nf4, whose `quantize` is another."""

    def __init__(self, quantize: Callable[[Tensor], nf4.Packed]) -> None:
        self.quantize = quantize

    def __getattr__(self, name: str) -> object:
        return getattr(nf4, name)
