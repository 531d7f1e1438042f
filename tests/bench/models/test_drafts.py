"""`bench --drafts`: a table and one line of JSON, with texts where there is a tokenizer, and passes alone without."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq.bench.models import drafts, model_bench, plan
from localq.bench.synthetic import sources
from localq.cli.verbs import bench_drafts
from localq.drafts import ROWS
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from tests.support.engine.engine_runs import ids_of
from tests.support.engine.mtp_models import save_mtp
from tests.support.models.tiny_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(drafts, "PASSES", 2)
    monkeypatch.setattr(drafts, "REQUESTS", {"prose": "Say abc abc abc.", "copy": "Copy: "})
    monkeypatch.setattr(drafts, "SOURCE", ("localq.engine.draft", "__init__.py"))
    monkeypatch.setattr(drafts, "TOKENS", {"prose": 12, "copy": 30})


def request_for(folder, ctx: int | None = None) -> model_bench.BenchRequest:
    files, opened = sources.from_files(folder)
    options = LoadOptions(device="cpu", dtype="float32", ctx=ctx)
    return model_bench.BenchRequest(files, opened, options, plan.make("8", "4", "0", repetitions=1))


def test_texts_and_passes_are_measured_and_the_replies_are_the_same(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.15, max_position_embeddings=2048)
    out, said = io.StringIO(), []
    result = drafts.run(request_for(folder), out, said.append, synthetic=False)
    lines = out.getvalue().splitlines()
    assert json.loads(lines[-1]) == result
    assert [each["rows"] for each in result["passes"]] == list(ROWS)
    assert all(each["ms"] > 0 for each in result["passes"])
    assert [(each["text"], each["tokens"]) for each in result["texts"]] == [("prose", 12), ("copy", 30)]
    for each in result["texts"]:
        assert (each["first_difference"], each["logit_gap"]) == (None, None)
        assert each["tokens_per_step"] >= 1
        assert sum(each["accepted_tokens"].values()) == sum(each["accepted_tokens_by_position"])
    assert "rows per pass" in lines[0]
    assert said[0].startswith("loading")


def test_a_draft_model_is_measured_with_its_time_per_token(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.15, max_position_embeddings=2048)
    out, request = io.StringIO(), request_for(folder)
    request = replace(request, draft=request.files)
    result = drafts.run(request, out, lambda state: None, synthetic=False)
    assert result["draft_model"] == request.files.name
    assert result["draft_token_ms"] > 0
    assert "draft token" in out.getvalue()
    assert all(each["first_difference"] is None for each in result["texts"])
    plain = drafts.run(request_for(folder), io.StringIO(), lambda state: None, synthetic=True)
    assert (plain["draft_model"], plain["draft_token_ms"]) == (None, None)


@pytest.mark.parametrize(("source", "synthetic", "mtp"), [
    (None, False, "auto"), ("mtp", False, "mtp"), ("lookup", False, ""), (None, True, ""),
])  # fmt: skip
def test_the_mtp_block_of_the_model_is_measured_unless_it_is_left_out(tmp_path, source, synthetic, mtp):
    folder = save_mtp(tmp_path / "hybrid", "qwen3_5_text", max_position_embeddings=2048)
    arguments = SimpleNamespace(synthetic=synthetic, quiet=True, yes=True)
    request = bench_drafts.with_draft(request_for(folder), source, Settings(), arguments)
    assert request.options.mtp == mtp
    if source == "mtp":
        result = drafts.run(request, io.StringIO(), lambda state: None, synthetic)
        assert result["draft_model"] == "mtp"
        assert result["draft_token_ms"] > 0
        assert all(each["first_difference"] is None for each in result["texts"])


def test_random_weights_have_passes_alone(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.15)
    result = drafts.run(request_for(folder), io.StringIO(), lambda state: None, synthetic=True)
    assert (len(result["passes"]), result["texts"]) == (4, [])


def test_a_context_that_is_too_short_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.15)
    with pytest.raises(LocalqError, match="too short for a"):
        drafts.run(request_for(folder, ctx=32), io.StringIO(), lambda state: None, synthetic=False)


def test_a_difference_is_told_with_the_gap_of_its_logits(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.15)
    files, _ = sources.from_files(folder)
    engine = Engine(load(files, LoadOptions(device="cpu", dtype="float32")))
    prompt = [1, 2, 3]
    plain = ids_of(engine, prompt, max_tokens=5)
    other = [*plain[:3], (plain[3] + 1) % 300, 7]
    found = drafts._difference(engine, prompt, plain, other)
    logits = engine.logits_after([*prompt, *plain[:3]])
    assert found["first_difference"] == 3
    assert found["logit_gap"] == pytest.approx(float(logits[plain[3]] - logits[other[3]]), abs=1e-3)
    assert int(logits.argmax()) == plain[3]
    assert ids_of(engine, prompt, max_tokens=5) == plain
