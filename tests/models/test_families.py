"""Every family against transformers on tiny random weights: the same logits, in one piece there, in steps here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.models import ARCHITECTURES, attention, decoder
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME, CASES
from tests.support.models.tiny_models import CONTEXT, logits_in_steps, ours, reference, reference_logits

TOLERANCE = 1e-4  # absolute, on f32 logits of a few units
every_case = pytest.mark.parametrize("name", BY_NAME)


def test_every_architecture_has_a_case():
    assert {case.config["model_type"] for case in CASES} == set(ARCHITECTURES)


@every_case
def test_prefill_in_pieces_and_cached_steps_give_the_logits_of_transformers(name):
    expected = reference_logits(name)
    assert expected.std() > 0.5, "the comparison needs logits that differ"
    torch.testing.assert_close(logits_in_steps(ours(name)), expected, rtol=0, atol=TOLERANCE)


@every_case
def test_the_oddity_of_the_case_shows_in_the_logits(name):
    case, model = BY_NAME[name], ours(name)
    plain = replace(model.config, **case.without(model.config))
    crippled = tiny_models.load(plain, case, reference(case).state_dict(), strict=False)
    assert (logits_in_steps(crippled) - reference_logits(name)).abs().max() > 100 * TOLERANCE


@every_case
def test_masks_over_a_whole_bucket_change_nothing(name, monkeypatch):
    """The path of a GPU: the host does not know the position, `live` is a bucket, masks hide the rest."""
    monkeypatch.setattr(decoder, "host_start", lambda positions: None)
    monkeypatch.setattr(attention, "SCORE_BYTES", 6 * CONTEXT * 4 * 5)  # five queries a block
    in_buckets = logits_in_steps(ours(name), live=lambda stop: -(-stop // 16) * 16)
    torch.testing.assert_close(in_buckets, reference_logits(name), rtol=0, atol=TOLERANCE)


@every_case
def test_bf16_is_as_near_to_f32_as_transformers_in_bf16(name):
    exact = reference_logits(name)
    theirs = (reference_logits(name, torch.bfloat16) - exact).abs().max()
    error = (logits_in_steps(ours(name, torch.bfloat16)) - exact).abs().max()
    assert error <= 2 * theirs


@every_case
def test_both_spellings_of_a_config_read_the_same(name):
    case = BY_NAME[name]
    module = ARCHITECTURES[case.config["model_type"]]
    rewritten = tiny_models.reference_config(case).to_dict()
    assert module.Config.from_dict(rewritten) == module.Config.from_dict(case.config)


def test_last_only_is_the_last_row():
    model, ids = ours("gemma2"), tiny_models.token_ids()[:9]
    cache = tiny_models.KVCache(model.cache_layout(), CONTEXT, torch.float32, "cpu")
    with torch.inference_mode():
        last = model(ids, torch.arange(9), cache, 9)
    torch.testing.assert_close(last, reference_logits("gemma2")[8:9], rtol=0, atol=TOLERANCE)


def test_keys_of_older_multimodal_files_name_the_same_parameters():
    rename = ARCHITECTURES["gemma3"].rename
    for key in reference(BY_NAME["gemma3-vision"]).state_dict():
        older = key.replace("model.language_model.", "language_model.model.").replace("model.vision", "vision")
        older = older.replace("model.multi_modal", "multi_modal")
        assert rename(older) == rename(key)
    assert rename("language_model.lm_head.weight") == "lm_head.weight"
