"""DRY, XTC and masks in whole replies on a GPU: as launch by launch, as on the CPU, without allocating, and between
plain replies, which stay what they were."""

from __future__ import annotations

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.device import DeviceChoice
from localq.engine.load.load import LoadedModel, load
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of
from tests.support.engine.scripted_constraint import VOCAB, Script
from tests.support.models.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.cuda
DRAW = Sampling(temperature=0.9, top_k=60, top_p=0.97, min_p=0.001, repeat_penalty=1.1, seed=9)
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.05}
CHOICES = {
    "DRY": Sampling(dry_multiplier=2.0),
    "XTC": Sampling(**{**DRAW.to_dict(), **XTC}),
    "DRY and XTC": Sampling(**{**DRAW.to_dict(), **XTC, "dry_multiplier": 2.0}),
    "mask": GREEDY,
    "mask, DRY and XTC": Sampling(**{**DRAW.to_dict(), **XTC, "dry_multiplier": 2.0}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("long"), dtype=torch.float32, initializer_range=0.15, max_position_embeddings=700
    )


def on_gpu(folder, dtype: str = "bfloat16") -> LoadedModel:
    gpu = DeviceChoice(torch.device("cuda", 0))
    return load(open_model(folder), LoadOptions(device="cuda", dtype=dtype), pick=lambda word: gpu)


def reply_of(engine: Engine, name: str, count: int = 150) -> list[int]:
    constraint = Script(*[range(step % 5, VOCAB, 5) for step in range(count + 1)]) if "mask" in name else None
    breakers = frozenset(range(0, VOCAB, 9))
    found = ids_of(engine, prompt_of(90), CHOICES[name], max_tokens=count, constraint=constraint, breakers=breakers)
    assert len(found) == count
    return found


def forget(engine: Engine) -> None:
    """Read something else: a prompt of which a part is read already goes through other kernels, to other last bits."""
    ids_of(engine, prompt_of(20, seed=1), max_tokens=1)


@pytest.mark.parametrize("name", CHOICES)
def test_behind_a_graph_as_launch_by_launch(folder, name):
    graphs, eager = Engine(on_gpu(folder)), Engine(on_gpu(folder), use_graphs=False)
    plain = ids_of(graphs, prompt_of(90), DRAW, max_tokens=40)
    forget(graphs)
    assert reply_of(graphs, name) == reply_of(eager, name)
    forget(graphs)
    assert ids_of(graphs, prompt_of(90), DRAW, max_tokens=40) == plain


@pytest.mark.parametrize("name", CHOICES)
def test_as_on_the_cpu(folder, name):
    here = Engine(load(open_model(folder), LoadOptions(device="cpu", dtype="float32")))
    there = Engine(on_gpu(folder, dtype="float32"))
    assert reply_of(there, name, 64) == reply_of(here, name, 64)


@pytest.mark.parametrize("name", CHOICES)
def test_nothing_is_allocated_for_a_token(folder, name):
    engine = Engine(on_gpu(folder))
    reply_of(engine, name, 3)
    constraint = Script(*[range(VOCAB)] * 200) if "mask" in name else None
    seen = set()
    for step in engine.generate(prompt_of(90), CHOICES[name], max_tokens=150, constraint=constraint):
        if step.ids:
            seen.add((torch.cuda.memory_stats()["allocation.all.allocated"], torch.cuda.mem_get_info()[0]))
    assert len(seen) == 1


def test_the_first_reply_with_all_of_it_takes_no_more_of_the_card(folder):
    engine = Engine(on_gpu(folder))
    reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    reply_of(engine, "mask, DRY and XTC", 20)
    assert (torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]) == (reserved, free)


def test_damage_is_found_behind_a_mask(folder):
    engine = Engine(on_gpu(folder))
    engine.model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(LocalqError, match="non-finite logits"):
        ids_of(engine, prompt_of(20), constraint=Script({3}, {4}))


def test_cancel_drops_the_pass_that_runs_ahead(folder):
    engine, script = Engine(on_gpu(folder)), Script(*[{id} for id in range(20, 90)])
    prompt = prompt_of(60)
    ids = ids_of(engine, prompt, cancelled=lambda: len(script.taken) == 5, constraint=script)
    assert ids == [20, 21, 22, 23, 24]
    assert engine.cached_tokens == len(prompt) + 4
