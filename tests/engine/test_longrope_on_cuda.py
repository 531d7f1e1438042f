"""A captured step follows longrope's two lists across the original context, as the CPU does in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.engine.longrope_models import CONTEXT, ORIGINAL, save_phi3

pytestmark = pytest.mark.cuda
COUNT = 12  # tokens of a reply
# Logits vary by about 2.5 here; roundings to float16 through two layers add up to less than 1 % of that.
NEAR_TIE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A float16 phi3 with heads of 64, whose pretraining had 64 of its 256 positions."""
    short, long = ([base + i * step for i in range(32)] for base, step in ((1, 0.05), (2, 0.2)))
    return save_phi3(tmp_path_factory.mktemp("phi3"), 256, short, long, torch.float16)


def engine_of(folder: Path, device: str, dtype: str) -> Engine:
    engine = Engine(load(open_model(folder), LoadOptions(device=device, dtype=dtype, ctx=CONTEXT)), chunk=16)
    assert engine.graphs == (device == "cuda")
    return engine


@torch.inference_mode()
def gap(folder: Path, ids: list[int], wanted: int, got: int) -> float:
    """By how much the model prefers `wanted` to `got` behind `ids`, in float32 on the CPU."""
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=CONTEXT))
    loaded.model.choose_length(len(ids))
    logits = loaded.model(torch.tensor(ids), torch.arange(len(ids)), loaded.cache, len(ids))[0]
    return float(logits[wanted] - logits[got])


def test_replies_on_both_sides_of_the_limit_and_across_it(folder):
    ours, reference = engine_of(folder, "cuda", "float16"), engine_of(folder, "cpu", "float32")
    compared = {"short": 0, "long": 0}
    for length in (20, 50, 56, 60, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, 100, 150, 20):
        prompt = prompt_of(length, seed=length)
        expected, found = (ids_of(each, prompt, max_tokens=COUNT) for each in (reference, ours))
        assert len(found) == len(expected) == COUNT
        for i, (wanted, got) in enumerate(zip(expected, found, strict=True)):
            if wanted != got:
                assert gap(folder, [*prompt, *expected[:i]], wanted, got) < NEAR_TIE
                break
            compared["long" if length + i > ORIGINAL else "short"] += 1
    assert min(compared.values()) > COUNT, compared
