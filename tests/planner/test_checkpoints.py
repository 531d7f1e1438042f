"""Host memory for checkpoints: none for models that need none, a few by default, and what the user asks for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.layer_caches import RecurrentState
from localq.planner import budget as load_budget
from localq.planner.checkpoints import KEPT, budget, bytes_of_one
from localq.settings import Settings
from tests.support.planner.catalogue_models import arch

GIB = 2**30


def test_only_what_cannot_be_cut_needs_any():
    assert bytes_of_one(arch("llama-3.1-8b"), 16, 2, 8192, 128) == 0
    gemma = arch("gemma-3-12b")
    slot = 2 * gemma.kv_heads * gemma.head_dim * 2
    assert bytes_of_one(gemma, 16, 2, 8192, 128) == 40 * 1023 * slot
    assert bytes_of_one(gemma, 4, 2, 8192, 128) < 0.3 * bytes_of_one(gemma, 16, 2, 8192, 128)
    assert bytes_of_one(gemma, 16, 2, 8192, None) == 0, "windows that do not slide"
    assert bytes_of_one(gemma, 16, 2, 1024 + 128, 128) == 0, "a context that they hold"


def test_a_hybrid_keeps_its_states():
    hybrid = replace(
        arch("qwen3-8b"), recurrent_layers=27, delta_key_heads=16, delta_value_heads=48, delta_key_dim=128,
        delta_value_dim=128, delta_kernel=4,
    )  # fmt: skip
    states = [each for each in hybrid.layer_caches if isinstance(each, RecurrentState)]
    assert len(states) == 27
    assert bytes_of_one(hybrid, 8, 2, 4096, 128) == 27 * (48 * 128 * 128 * 4 + 10_240 * 3 * 2)


def test_a_few_by_default_and_less_where_the_ram_is_small():
    assert budget(100, None, 10**9) == KEPT * 100
    assert budget(GIB // 2, None, 64 * GIB) == 2 * GIB
    assert budget(3 * GIB, None, 64 * GIB) == 6 * GIB
    assert budget(3 * GIB, None, 15 * GIB) == 3 * GIB
    assert budget(100, None, 1300) == 300
    assert budget(100, None, 399) == budget(100, None, -5) == 0
    assert budget(0, GIB, 10 * GIB) == 0


def test_a_wish_is_kept_or_refused():
    assert budget(100, 3 * GIB, 4 * GIB) == 3 * GIB
    assert budget(100, 0, 4 * GIB) == 0
    with pytest.raises(LocalqError, match=r"not enough free RAM: need 3\.2 GB, have 2\.1 GB") as caught:
        budget(GIB, 3 * GIB, 2 * GIB)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT


@pytest.mark.parametrize(("text", "size"), [("auto", None), ("off", 0), ("0", 0), ("300MiB", 300 * 2**20)])
def test_the_setting(text, size):
    assert load_budget.checkpoint_bytes(Settings(checkpoints=text)) == size
    assert load_budget.load_options(Settings(checkpoints=text), "x").checkpoint_bytes == size


def test_no_size():
    with pytest.raises(LocalqError) as caught:
        load_budget.checkpoint_bytes(Settings(checkpoints="some"))
    assert caught.value.exit_code == ExitCode.USAGE
