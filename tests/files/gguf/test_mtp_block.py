"""The MTP block of .gguf files: tensors under their Hugging Face names, with the values of the folder, and drafts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from localq.engine.draft.drafter import Drafter
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import read_tensor
from localq.files.model_folder import open_model
from localq.planner import model_facts
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.lossless import EagerTimes
from tests.support.engine.mtp_models import OPTIONS, loads
from tests.support.files import tiny_gguf_families as families
from tests.support.files.tiny_gguf_conversion import Weights, converted

LAYERS = families.SHAPE["num_hidden_layers"]
JOINT = {
    "mtp.fc": "nextn.eh_proj",
    "mtp.norm": "nextn.shared_head_norm",
    "mtp.pre_fc_norm_embedding": "nextn.enorm",
    "mtp.pre_fc_norm_hidden": "nextn.hnorm",
}


def block_of(weights: Weights) -> Weights:
    """A block under `mtp.`, whose layer is like the first one of attention."""
    draw = np.random.default_rng(8)
    first = next(name for name in weights if name.endswith("self_attn.q_proj.weight"))
    prefix = ".".join(first.split(".")[:3]) + "."
    found = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": each + np.float32(0.02) * draw.standard_normal(each.shape, "f4")
        for name, each in weights.items()
        if name.startswith(prefix)
    }
    hidden = families.SHAPE["hidden_size"]
    sizes = {"mtp.fc": (hidden, 2 * hidden)}
    return found | {f"{name}.weight": draw.standard_normal(sizes.get(name, (hidden,)), "f4") * 0.1 for name in JOINT}


def write(path: Path, case: families.Case, weights: Weights, block: Weights, **more: np.ndarray) -> Path:
    """A file that has the block as llama.cpp's converter writes it."""
    config = {**families.SHAPE, **case.config}
    layer = {
        name.replace("mtp.layers.0.", f"model.layers.{LAYERS}."): each
        for name, each in block.items()
        if name.startswith("mtp.layers.")
    }
    stored = dict(converted(case, {**config, "num_hidden_layers": LAYERS + 1}, layer))
    for name, renamed in JOINT.items():
        values = block[f"{name}.weight"]
        stored[f"blk.{LAYERS}.{renamed}.weight"] = values if values.ndim == 2 else values + np.float32(1)

    def change(tensors: Weights) -> None:
        for name in [name for name in tensors if name.startswith(f"blk.{LAYERS}.")]:
            del tensors[name]
        tensors |= {**stored, **more}

    return families.write(path, case, weights, predicting=1, change=change)


@pytest.fixture(scope="module", params=["qwen35", "qwen35moe"])
def made(request, tmp_path_factory):
    """(path of the file, tensors of the block)"""
    case, folder = families.CASES[request.param], tmp_path_factory.mktemp(request.param)
    weights = families.read_folder(families.make_folder(case, folder / "folder"))
    block = block_of(weights)
    return write(folder / "m.gguf", case, weights, block), block


def test_the_tensors_are_those_of_the_folder(made):
    path, block = made
    header = read_header(path)
    assert header.mtp.keys() == block.keys()
    part = dataclasses.replace(header, tensors=header.mtp)
    for name, values in block.items():
        np.testing.assert_allclose(read_tensor(part, name), values, rtol=0, atol=1e-6, err_msg=name)
    assert not any(name.startswith("mtp.") for name in header.tensors)


def test_it_drafts(made):
    path, block = made
    model, head = loads(path)
    parameters = dict(head.model.named_parameters())
    for name in ("fc.weight", "norm.weight", "pre_fc_norm_hidden.weight", "layers.0.self_attn.q_norm.weight"):
        torch.testing.assert_close(parameters[name], torch.from_numpy(block[f"mtp.{name}"]), rtol=0, atol=1e-6)
    engine = Engine(model, draft_tokens=7, draft=head)
    engine._drafter = Drafter(engine._draft_model)
    engine._drafter.times = EagerTimes()
    prompt = prompt_of(20, vocab=model.vocab)
    steps = steps_of(engine, prompt, max_tokens=30, draft_tokens=3)
    plain = Engine(load(open_model(path), LoadOptions(device="cpu", dtype="float32")))
    assert [id for step in steps for id in step.ids] == ids_of(plain, prompt, max_tokens=30)
    assert steps[-1].stats.drafted["mtp"] > 10


def test_facts_name_it(made):
    path, _ = made
    facts = model_facts.of_name(str(path), Settings())
    assert facts["architecture"]["mtp"]
    assert any(line.startswith("MTP block") for line in model_facts.lines(facts))


def test_a_block_with_copies_of_embedding_and_head_is_read_and_one_of_another_make_is_not(made, tmp_path):
    _, block = made
    case = families.CASES["qwen35moe" if any("experts" in name for name in block) else "qwen35"]
    weights = families.read_folder(families.make_folder(case, tmp_path / "folder"))
    copies = {
        f"blk.{LAYERS}.nextn.{name}.weight": np.ones((3, 4), "f4") for name in ("embed_tokens", "shared_head_head")
    }
    assert read_header(write(tmp_path / "1.gguf", case, weights, block, **copies)).mtp.keys() == block.keys()
    odd = {f"blk.{LAYERS}.attn_odd.weight": np.ones((3, 4), "f4")}
    path = write(tmp_path / "2.gguf", case, weights, block, **odd)
    assert read_header(path).mtp == {}
    model, head = loads(path, dataclasses.replace(OPTIONS, mtp="auto"))
    assert (head, model.no_mtp) == (None, "the files contain no MTP block")
