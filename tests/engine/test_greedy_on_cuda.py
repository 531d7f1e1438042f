"""The main promise on a real model: smollm2-135m@nf4 answers on the GPU as the CPU reference does."""

from __future__ import annotations

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from localq.sampling import Sampling
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2

pytestmark = pytest.mark.cuda

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a brick.",
    "Translate 'good morning' into Spanish and German.",
]
TOKENS = 64
# Logits are about 20 in size, so one rounding of them is 20 * 2^-11 = 0.01 in float16 and 0.08 in bfloat16; roundings
# through 30 layers add up to a few of these. A gap below five of them is a tie that rounding may break.
NEAR_TIE = {"float16": 0.05, "bfloat16": 0.4}


@pytest.fixture(scope="module")
def nf4_folder(tmp_path_factory):
    return convert(TensorwiseRequest(open_model(smollm2()), "nf4", tmp_path_factory.mktemp("smollm2") / "nf4"))


@pytest.fixture(scope="module")
def prompts(nf4_folder) -> list[list[int]]:
    tokenizer = Tokenizer.load(open_model(nf4_folder))
    return [tokenizer.chat_ids([{"role": "user", "content": text}]) for text in PROMPTS]


def replies(folder, prompts: list[list[int]], device: str, dtype: str) -> list[list[int]]:
    engine = Engine(load(open_model(folder), LoadOptions(device=device, dtype=dtype, ctx=512)))
    assert engine.graphs == (device == "cuda")
    found = []
    for prompt in prompts:
        ids: list[int] = []
        for step in engine.generate(prompt, Sampling(), frozenset({2}), TOKENS):
            ids += step.ids
        found.append(ids)
    return found


@pytest.fixture(scope="module")
def reference(nf4_folder, prompts) -> list[list[int]]:
    return replies(nf4_folder, prompts, "cpu", "float32")


@torch.inference_mode()
def gap_at_difference(folder, prompt: list[int], ours: list[int], expected: list[int]) -> tuple[int, float]:
    """Where the replies part, and by how much the reference prefers its own token to ours there (f32, CPU)."""
    at = next((i for i, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), None)
    at = min(len(ours), len(expected)) if at is None else at
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype="float32", ctx=512))
    ids = torch.tensor([*prompt, *expected[:at]])
    logits = loaded.model(ids, torch.arange(len(ids)), loaded.cache, len(ids))[0]
    wanted = expected[at] if at < len(expected) else 2
    got = ours[at] if at < len(ours) else 2
    return at, float(logits[wanted] - logits[got])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_greedy_tokens_equal_the_cpu_reference(nf4_folder, prompts, reference, dtype):
    found = replies(nf4_folder, prompts, "cuda", dtype)
    for text, prompt, ours, expected in zip(PROMPTS, prompts, found, reference, strict=True):
        if ours == expected:
            print(f"{dtype}: {text} -> {len(ours)} tokens, all equal")
            continue
        at, gap = gap_at_difference(nf4_folder, prompt, ours, expected)
        print(f"{dtype}: {text} -> first difference at token {at}, reference prefers its own by {gap:.4f}")
        assert 0 <= gap < NEAR_TIE[dtype], f"{text}: token {at} differs and is no near-tie ({gap})"
