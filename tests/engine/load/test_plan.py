"""What a load asks the planner, on a GPU that is numbers: the budget, who could make room, and going on by force."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from localq import gpus
from localq.engine.load import plan as load_plan
from localq.engine.load import vram, weights
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from localq.planner.load_options import LoadOptions
from tests.support.models.tiny_checkpoints import make_checkpoint

MIB = 2**20
CARD = gpus.Gpu(0, "card", "GPU-aa", (8, 9), 2048 * MIB, 100 * MIB, (
    gpus.Process(7, 812 * MIB, "firefox"), gpus.Process(os.getpid(), 500 * MIB, "python"), gpus.Process(9, None),
))  # fmt: skip


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """(budget, options, what there is, hard) -> what `planned` gives for a tiny model, and the limits that it set."""
    files = open_model(make_checkpoint(tmp_path))
    family = architecture(files.config)
    limits: list[int] = []

    def hold(held: vram.VramBudget, outside: int) -> vram.VramBudget:
        limits.append(outside)
        return held

    monkeypatch.setattr(vram.VramBudget, "hold", hold)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="aa"))
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (CARD,)))

    def planned(budget: int, options: LoadOptions, available: int, hard: bool):
        with torch.device("meta"):
            model = family.Model(family.Config.from_dict(files.config))
        held = vram.VramBudget(torch.device("cuda", 0), budget, hard, 0, 300 * MIB, 0, budget, 0, available)
        with open_checkpoint(files) as checkpoint:
            assignment = weights.assign(checkpoint, model, family.rename, files.name)
            return *load_plan.plan_load(files, options, assignment, 10 * MIB, torch.float16, held), limits

    return planned


def test_a_plan_that_fits_limits_the_allocator(plan):
    made, held, limits = plan(2000 * MIB, LoadOptions(), 2000 * MIB, False)
    assert (made.fits, held.hard) == (True, False)
    assert limits == [made.ledger.components["cuda_context"] + made.ledger.components["graphs"]]


def test_a_model_that_thinks_is_planned_as_one_that_thinks(plan):
    assert plan(2000 * MIB, LoadOptions(thinks=True), 2000 * MIB, False)[0].arch.thinks
    assert not plan(2000 * MIB, LoadOptions(), 2000 * MIB, False)[0].arch.thinks


@pytest.mark.parametrize(("available", "hard", "way"), [
    (330 * MIB, False, r"by closing firefox \(pid 7, 812 MiB\), a process \(pid 9\)"), (330 * MIB, True, "by closing"),
    (900 * MIB, True, "with a larger --vram"),
])  # fmt: skip
def test_a_refusal_names_whoever_holds_the_memory_or_the_budget(plan, available, hard, way):
    with pytest.raises(LocalqError, match=way) as raised:
        plan(330 * MIB, LoadOptions(), available, hard)
    assert raised.value.exit_code == ExitCode.DOES_NOT_FIT


def test_by_force_nothing_is_limited(plan):
    made, held, limits = plan(330 * MIB, LoadOptions(force=True, ctx=64), 330 * MIB, True)
    assert (made.fits, made.ctx, held.hard, limits) == (False, 64, False, [])


def test_nobody_else_is_on_the_card():
    alone = gpus.Gpu(0, "card", "GPU-aa", None, 1, 1, (gpus.Process(5, 3),))
    assert gpus.closing_hint(alone, 5) == gpus.closing_hint(None) == "by closing other programs that are using the GPU"
    assert gpus._name(os.getpid())
    assert gpus._name(2**30) == ""
