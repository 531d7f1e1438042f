"""Mixtures with a shared expert on a GPU, loaded from files: three launches where it is like the others, else five."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.step import fused
from localq.engine.step.graph import StepGraphs
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.models.experts import StackedExpert
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.engine.test_mixtures_on_cuda import loaded, settled_seed
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of
from tests.support.engine.fused_models import assert_as_good_as_the_modules, step_of
from tests.support.formats import expert_checkpoints, hybrid_checkpoints
from tests.support.formats.hybrid_checkpoints import in_nf4
from tests.support.quantize.vq2_conversions import converted

pytestmark = pytest.mark.cuda
STACKED = ("bf16", "bf16 in one tensor", "nf4", "nf4 by localq", "mxfp4")
APART = ("nf4 beside 16 bit", "nf4 of another width", "vq2")
every_case = pytest.mark.parametrize("name", [*STACKED, *APART])
KEPT = ("in_proj_a.weight", "in_proj_b.weight", "gate.weight")
WIDE_HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # as the kernel of the delta rule takes


def is_kept(name: str) -> bool:
    """What stays in 16 bit beside NF4."""
    return name.endswith(KEPT)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("shared")
    like, wide = (
        hybrid_checkpoints.source(place / name, "qwen3_5_moe", **WIDE_HEADS, shared_expert_intermediate_size=width)
        for name, width in (("like", 64), ("wide", 192))
    )
    made = {
        format: by_tensor.convert(TensorwiseRequest(open_model(like), format, place / format))
        for format in ("nf4", "mxfp4")
    }
    found = {
        "bf16": like,
        "bf16 in one tensor": expert_checkpoints.fused(place / "fused", like),
        "nf4 by localq": made["nf4"],
        "mxfp4": made["mxfp4"],
        "vq2": converted(like, place / "vq2", format="vq2"),
    }
    if importlib.util.find_spec("bitsandbytes") is not None:
        kept_16 = in_nf4(place / "beside", like, lambda name: is_kept(name) or ".shared_expert." in name)[0]
        found |= {
            "nf4": in_nf4(place / "bnb", like, is_kept)[0],
            "nf4 beside 16 bit": kept_16,
            "nf4 of another width": in_nf4(place / "other", wide, is_kept)[0],
        }
    return found


@pytest.fixture
def folder(name, folders) -> Path:
    if name not in folders:
        pytest.skip(f"{name} needs bitsandbytes")
    return folders[name]


@every_case
def test_launches_are_as_near_to_f32_as_the_modules(name, folder):
    ours, exact = loaded(folder, "cuda"), loaded(folder, "cpu")
    assert fused.why_not(ours.model) == ""
    assert all(isinstance(block.mlp.shared_expert, StackedExpert) == (name in STACKED) for block in ours.model.layers)
    maps = nf4.CODE_MAP.nbytes + nf4.dynamic_map().nbytes  # of NF4, shared by all matrices
    assert 0 <= ours.ledger["weights"] - ours.plan.ledger.components["weights"] <= maps
    assert_as_good_as_the_modules(ours.model, exact.model, settled_seed(exact.model))


@every_case
def test_as_few_launches_as_can_be(name, folder):
    step, _ = step_of(loaded(folder, "cuda").model, 512)
    found = [each.operation for each in step.launches(greedy=True)]
    of_mixture = [each for each in found if each in ("router", "gate_up", "down")]
    count = 3 if name in STACKED else 7 if name == "nf4 of another width" else 5
    assert len(of_mixture) == count * 3


@every_case
@torch.inference_mode()
def test_a_graph_equals_the_launches_bit_for_bit_and_allocates_nothing(name, folder):
    model = loaded(folder, "cuda").model
    step, cache = step_of(model, 512)
    graphs, states = StepGraphs(step), [part for state in cache.states.values() for part in state]
    tokens = torch.randint(model.config.vocab_size, (60,), generator=torch.Generator().manual_seed(4)).cuda()
    differing = torch.zeros(1, dtype=torch.int64, device="cuda")
    for position in range(60):  # every position is fed thrice, with what stands before it
        found, before = [], [part.clone() for part in states]
        for run in (graphs.replay, step.run, step.run):
            step.state.rewind(position)
            for part, kept in zip(states, before, strict=True):
                part.copy_(kept)
            step.state.token.copy_(tokens[position : position + 1])
            step.logits.fill_(float("nan"))
            run(True)
            found.append(step.logits.clone())
        differing += sum((each != found[0]).sum() for each in found[1:])  # NaN differs from itself
    assert int(differing) == 0
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    for greedy in (True, False):
        for run in (graphs.replay, step.run):
            run(greedy)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


@every_case
def test_a_reply_takes_graphs(name, folder):
    engine = Engine(loaded(folder, "cuda"))
    assert engine.graphs
    assert not [note for note in engine.notes if "no kernel" in note]
    assert ids_of(engine, prompt_of(50), GREEDY, max_tokens=20)
