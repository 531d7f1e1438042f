"""`localq eval` from files to figures: against transformers, against references, and on the real model."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from localq.bench.quality import evaluation
from localq.bench.quality.evaluation import REFERENCE, EvaluationRequest
from localq.cli.verbs.eval import DEFAULT_TEXT
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import make_checkpoint

TEXT = Path(__file__).parents[3] / "LICENSE"  # prose that every checkout has
WINDOW = 96


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much where the machine is busy."""
    torch.set_num_threads(1)


def evaluated(folder: Path, device: str = "cpu", **asked: Any) -> dict[str, Any]:
    options = LoadOptions(device=device, **{"dtype": "float32", **asked.pop("options", {})})
    raw = asked.pop("raw", TEXT.read_bytes())
    asked = {"text": "LICENSE", "window": WINDOW, "most": 3, **asked}
    if asked.get("against") not in (None, REFERENCE):
        asked["rival"] = open_model(Path(asked["against"]))
    return evaluation.run(EvaluationRequest(open_model(folder), options, raw, **asked))


@torch.no_grad()
def test_perplexities_are_those_of_transformers_on_the_same_ids(plain):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(plain)
    with TEXT.open() as lines:
        joined = "\n\n".join(line if line.strip() else "" for line in lines)
    found = evaluated(plain)
    for key, text, first in (
        ("perplexity", joined, 0),
        ("perplexity_llamacpp", TEXT.read_text(), WINDOW // 2),
    ):
        ids = torch.tensor(tokenizer(text).input_ids[: 3 * WINDOW]).view(3, WINDOW)
        logits = reference(ids).logits[:, first:-1].double()
        expected = F.cross_entropy(logits.flatten(0, 1), ids[:, first + 1 :].flatten()).exp().item()
        assert found[key] == pytest.approx(expected, rel=1e-5)
    assert (found["n_windows"], found["n_windows_llamacpp"], found["window"]) == (3, 3, WINDOW)


def test_all_that_is_said(plain):
    found = evaluated(plain, most=1)
    assert found["text_sha256"] == hashlib.sha256(TEXT.read_bytes()).hexdigest()
    assert (found["kl"], found["top1"], found["against"], found["perplexity_reference"]) == (None,) * 4
    assert (found["decode_tokens"], found["decode_kl"], found["decode_top1"]) == (0, None, None)
    assert (found["bits_per_weight"], found["format"], found["dtype"]) == (16.0, "fp32", "float32")
    assert (found["kv_bits"], found["head"], found["ctx"]) == (16, "16", WINDOW)
    assert found["conditions"]["device"] == "CPU"
    assert {"torch", "commit", "localq"} <= set(found["conditions"])
    assert "seed" not in found["conditions"]


def test_on_the_cpu_nf4_is_its_own_reference(nf4_folder):
    found = evaluated(nf4_folder, against=REFERENCE, decode=40)
    assert (found["kl"], found["top1"]) == (0.0, 1.0)
    assert found["perplexity"] == found["perplexity_reference"]
    assert 0 <= found["decode_kl"] < 1e-8
    assert found["decode_top1"] == 1
    assert 4 < found["bits_per_weight"] < 5  # tables weigh on matrices as small as these


def test_what_is_saved_on_the_model_is_not_saved_on_its_reference(plain):
    found = evaluated(plain, against=REFERENCE, options={"kv_bits": 4, "head": "8"})
    assert (found["kv_bits"], found["head"], found["against_dtype"]) == (4, "8", "float32")
    assert found["kl"] > 1e-6
    assert found["perplexity"] != found["perplexity_reference"]
    assert found["perplexity_reference"] == evaluated(plain)["perplexity"]


def test_against_another_model(plain, nf4_folder):
    found = evaluated(nf4_folder, against=str(plain))
    assert found["kl"] > 1e-4
    assert 0 < found["top1"] < 1
    assert found["perplexity_reference"] == evaluated(plain)["perplexity"]


def test_a_reference_that_does_not_fit_in_float32_is_told(nf4_folder, monkeypatch):
    def loaded(files, options, *rest, **more):
        if options.name == REFERENCE and options.dtype == "float32":
            raise LocalqError("reference", "too large", "", ExitCode.DOES_NOT_FIT)
        return load(files, options, *rest, **more)

    load = evaluation.load
    monkeypatch.setattr(evaluation, "load", loaded)
    found = evaluated(nf4_folder, against=REFERENCE, options={"dtype": "bfloat16"})
    assert found["against_dtype"] == "bfloat16"
    assert found["kl"] == 0
    assert "does not fit in memory in float32" in found["notes"][-1]
    with pytest.raises(LocalqError, match="too large"):
        evaluated(nf4_folder, against=REFERENCE)


def test_another_vocabulary_is_refused_by_name(plain, tmp_path):
    wider = make_checkpoint(tmp_path / "wider", vocab_size=384)
    with pytest.raises(LocalqError, match=r"wider differs from that of .* \(384 and 320 tokens\)") as caught:
        evaluated(plain, against=str(wider))
    assert caught.value.exit_code == ExitCode.USAGE
    renamed = make_checkpoint(tmp_path / "renamed")
    text = (renamed / "tokenizer.json").read_text()
    assert '"Ġthe"' in text
    (renamed / "tokenizer.json").write_text(text.replace('"the"', '"teh"').replace('"Ġthe"', '"Ġteh"'))
    with pytest.raises(LocalqError):
        evaluated(plain, against=str(renamed))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"raw": b""}, "LICENSE: the text is empty"),
        ({"raw": b" \n\n"}, "LICENSE: the text is empty"),
        ({"raw": b"\xff\xfe" * 400}, "not UTF-8"),
        ({"raw": b"a few words"}, r"tokens, fewer than one window of 96"),
        ({"options": {"ctx": 95}}, "a context of 95 tokens is too short for a window of 96 tokens"),
        ({"window": 513}, "512"),
        ({"decode": 96}, "96 steps"),
    ],
)
def test_wrong_use(plain, asked, said):
    with pytest.raises(LocalqError, match=said) as caught:
        evaluated(plain, **asked)
    assert caught.value.exit_code == ExitCode.USAGE


def test_the_text_that_comes_along_is_the_one_that_is_described():
    raw = DEFAULT_TEXT.read_bytes()
    described = (DEFAULT_TEXT.parent / "README.md").read_text()
    assert DEFAULT_TEXT.name in described
    assert hashlib.sha256(raw).hexdigest() in described
    assert "Attribution-ShareAlike" in " ".join(described.split())


def test_the_real_model_on_the_text_that_comes_along():
    files = open_model(smollm2())
    found = evaluation.run(
        EvaluationRequest(
            files,
            LoadOptions(device="cpu", dtype="float32"),
            DEFAULT_TEXT.read_bytes(),
            DEFAULT_TEXT.name,
            window=128,
            most=1,
        )
    )
    assert 8 < found["perplexity"] < 40
    assert math.isfinite(found["perplexity_llamacpp"])
    assert (found["format"], found["bits_per_weight"]) == ("gguf", 5.0)
    ids = Tokenizer.load(files).encode(DEFAULT_TEXT.read_text(), special=True)
    assert len(ids) // 2048 == 12  # as the figures in README are stated


@pytest.mark.cuda
def test_on_a_gpu_nf4_is_as_near_to_its_definition_as_16_bits_allow(tmp_path):
    folder = convert(TensorwiseRequest(open_model(smollm2()), "nf4", tmp_path / "nf4"))
    request = EvaluationRequest(
        open_model(folder), LoadOptions(device="cuda", dtype="float16"), DEFAULT_TEXT.read_bytes(), DEFAULT_TEXT.name,
        window=512, most=2, against=REFERENCE, decode=256,
    )  # fmt: skip
    found = evaluation.run(request)
    print({key: found[key] for key in ("perplexity", "perplexity_reference", "kl", "top1", "decode_kl")})
    assert found["against_dtype"] == "float32"
    assert 0 < found["kl"] <= 1e-3
    assert found["top1"] >= 0.98
    assert found["perplexity"] == pytest.approx(found["perplexity_reference"], rel=1e-3)
    assert 0 < found["decode_kl"] <= 1e-3


@pytest.mark.cuda
def test_on_a_gpu_every_way_to_save_memory_can_be_judged(nf4_folder):
    saving = {"dtype": "bfloat16", "kv_bits": 8, "head": "nf4", "embed": "host"}
    found = evaluated(nf4_folder, "cuda", against=REFERENCE, decode=40, options=saving)
    assert (found["kv_bits"], found["head"], found["embed"]) == (8, "nf4", "host")
    assert found["kl"] > 0
    assert found["decode_kl"] < 0.05
