"""Mixtures on a GPU, loaded from files as published: packed, prefilled expert by expert, decoded by launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.engine.step import fused
from localq.engine.step.graph import StepGraphs
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.models.decoder import Decoder
from localq.models.experts import Mixture, Router
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of
from tests.support.engine.fused_models import assert_as_good_as_the_modules, by_modules, step_of, text_of
from tests.support.files import tiny_gguf_families as families
from tests.support.formats import expert_checkpoints
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import converted

pytestmark = pytest.mark.cuda
CASES = ("gpt_oss mxfp4", "gpt_oss nf4", "mixtral bf16", "mixtral nf4", "mixtral mxfp4", "qwen3_moe bf16",
         "qwen3_moe nf4", "qwen3_moe routers", "mixtral vq2", "qwen3_moe vq2", "mixtral aqlm2x8",
         "qwen3_moe gguf")  # fmt: skip
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("mixtures")
    plain = {kind: expert_checkpoints.source(place / kind, kind) for kind in ("mixtral", "qwen3_moe")}
    oss = make_checkpoint(place / "gpt_oss", "gpt_oss", shard_bytes=2**30)
    made = {f"{kind} bf16": folder for kind, folder in plain.items()}
    made |= {
        f"{kind} nf4": by_tensor.convert(TensorwiseRequest(open_model(plain[kind]), "nf4", place / f"{kind}-nf4"))
        for kind in plain
    }
    for kind, format in (("mixtral", "vq2"), ("qwen3_moe", "vq2"), ("mixtral", "aqlm2x8")):
        made[f"{kind} {format}"] = converted(plain[kind], place / f"{kind}-{format}", format=format)
    made["mixtral mxfp4"] = by_tensor.convert(
        TensorwiseRequest(open_model(plain["mixtral"]), "mxfp4", place / "mixtral-mxfp4")
    )
    made["qwen3_moe routers"] = expert_checkpoints.quantized(place / "hub", plain["qwen3_moe"], "nf4", routers=True)[0]
    made["qwen3_moe gguf"] = in_gguf_blocks(place)
    made["gpt_oss mxfp4"] = published = expert_checkpoints.gpt_oss_published(place / "published", oss)
    return {
        **made,
        "gpt_oss nf4": by_tensor.convert(TensorwiseRequest(open_model(published), "nf4", place / "gpt_oss-nf4")),
    }


def in_gguf_blocks(place: Path) -> Path:
    """A .gguf file whose experts are in Q8_0 blocks, in whole tiles of the kernels."""
    case = families.CASES["qwen3moe"]
    case = replace(case, config={**case.config, "moe_intermediate_size": 64, "max_position_embeddings": 512})
    weights = families.read_folder(families.make_folder(case, place / "qwen3moe"))
    return families.write(place / "qwen3moe.gguf", case, weights, experts="Q8_0")


def loaded(folder: Path, device: str) -> LoadedModel:
    return load(
        open_model(folder), LoadOptions(device=device, dtype="float16" if device == "cuda" else "float32", ctx=512)
    )


def settled_seed(exact: Decoder) -> int:
    """Of a text at which no rounding of float16 decides between two experts: their logits are far enough apart."""
    margins: list[float] = []

    def watch(router: Router, given: tuple[torch.Tensor]) -> None:
        logits = torch.nn.functional.linear(given[0], router.weight, router.bias).sort(-1, descending=True).values
        margins.append(float((logits[:, router.active - 1] - logits[:, router.active]).min()))

    hooks = [block.mlp.register_forward_pre_hook(lambda mixture, given: watch(mixture.router, given))
             for block in exact.layers if isinstance(block.mlp, Mixture)]  # fmt: skip
    try:
        for seed in range(200):
            margins.clear()
            with torch.inference_mode():
                by_modules(exact, text_of(exact.config.vocab_size, seed), "cpu")
            if min(margins) > 0.01:
                return seed
    finally:
        for hook in hooks:
            hook.remove()
    raise AssertionError("every text has tokens between two experts")


@every_case
def test_launches_are_as_near_to_f32_as_the_modules(name, folders):
    ours, exact = loaded(folders[name], "cuda"), loaded(folders[name], "cpu")
    assert fused.why_not(ours.model) == ""
    maps = nf4.CODE_MAP.nbytes + nf4.dynamic_map().nbytes  # of NF4, shared by all matrices
    assert 0 <= ours.ledger["weights"] - ours.plan.ledger.components["weights"] <= maps
    assert_as_good_as_the_modules(ours.model, exact.model, settled_seed(exact.model))


@every_case
@torch.inference_mode()
def test_a_graph_equals_the_launches_bit_for_bit_whatever_is_chosen(name, folders):
    model = loaded(folders[name], "cuda").model
    step, _ = step_of(model, 512)
    graphs = StepGraphs(step)
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(320, (60,), generator=generator).cuda()
    differing = torch.zeros(1, dtype=torch.int64, device="cuda")
    for position in range(60):  # every position is fed twice, with what stands before it
        found = []
        for run in (graphs.replay, step.run):
            step.state.rewind(position)
            step.state.token.copy_(tokens[position : position + 1])
            step.logits.fill_(float("nan"))
            run(True)
            found.append(step.logits.clone())
        differing += (found[0] != found[1]).sum()  # NaN differs from itself
    assert int(differing) == 0


@every_case
@torch.inference_mode()
def test_a_step_allocates_nothing_in_a_graph_or_not(name, folders):
    step, _ = step_of(loaded(folders[name], "cuda").model, 512)
    graphs = StepGraphs(step)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for greedy in (True, False):
        for run in (graphs.replay, step.run):
            run(greedy)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@every_case
def test_a_prompt_in_pieces_is_the_prompt_as_one(name, folders):
    """Tokens are grouped by expert: other groups, the same sums but for the order of products."""
    ours, exact = loaded(folders[name], "cuda"), loaded(folders[name], "cpu").model
    ids = text_of(ours.vocab, settled_seed(exact)).cuda()
    rows = []
    with torch.inference_mode():
        for pieces in ((len(ids),), (40, len(ids) - 41, 1)):
            ours.cache.clear()
            start = 0
            for count in pieces:
                places = torch.arange(start, start + count, device="cuda")
                out = ours.model(ids[start : start + count], places, ours.cache, start + count)
                start += count
            rows.append(out.float())
    assert (rows[0] - rows[1]).norm() <= 0.01 * rows[0].norm()


@every_case
def test_a_reply_takes_graphs_and_says_nothing_of_missing_kernels(name, folders):
    engine = Engine(loaded(folders[name], "cuda"))
    assert engine.graphs
    assert not [note for note in engine.notes if "no kernel" in note]
    assert ids_of(engine, prompt_of(50), GREEDY, max_tokens=20)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Formats without kernels for experts."""
    place = tmp_path_factory.mktemp("others")
    plain = expert_checkpoints.source(place / "plain", "mixtral")
    made = {
        each: by_tensor.convert(TensorwiseRequest(open_model(plain), each, place / each))
        for each in ("bcq", "squeezellm")
    }
    published = ("awq", "gptq", "aqlm 1x16g8")
    return made | {each: expert_checkpoints.quantized(place / each, plain, each)[0] for each in published}


@pytest.mark.parametrize("format", ["awq", "gptq", "aqlm 1x16g8", "bcq", "squeezellm"])
def test_experts_without_kernels_of_their_own_run_one_after_the_other(format, others):
    ours, exact = loaded(others[format], "cuda"), loaded(others[format], "cpu")
    assert "no kernel supports experts in this format" in fused.why_not(ours.model)
    assert ours.ledger["weights"] == ours.plan.ledger.components["weights"]
    ids = text_of(ours.vocab, settled_seed(exact.model))
    with torch.inference_mode():
        logits = []
        for each, device in ((ours, "cuda"), (exact, "cpu")):
            each.cache.clear()
            places = torch.arange(len(ids), device=device)
            logits.append(each.model(ids.to(device), places, each.cache, len(ids)).float().cpu())
    assert (logits[0] - logits[1]).norm() <= 0.01 * logits[1].norm()
    engine = Engine(ours)
    assert not engine.graphs
    assert ids_of(engine, prompt_of(50), GREEDY, max_tokens=20)
