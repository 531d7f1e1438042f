"""The list, `chat --dry-run` and `pull` say the same of every model: one memory check, on a GPU and on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from localq import gpus
from localq.files import catalog
from localq.planner import choose, offers, pull_report, ram, room
from localq.planner.ram import Ram
from localq.settings import Settings
from localq.tui.models import picker_plans
from localq.tui.models.picker_rows import TOO_LARGE

GIB = 2**30
CARD = gpus.Gpu(0, "NVIDIA GeForce RTX 3090", "GPU-a", (8, 6), 24 * GIB, 11 * GIB, None)


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    for name, path in (("LOCALQ_MODELS", "none.toml"), ("LOCALQ_DATA", "data"), ("LOCALQ_CACHE", "cache"),
                       ("LOCALQ_CONFIG", "config.toml"), ("HF_HUB_CACHE", "hub")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=23 * 10**9))
    monkeypatch.setattr(ram, "CGROUP", tmp_path)


@pytest.mark.parametrize("cards", [(), (CARD,)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("changed", [{}, {"ctx": 4096}, {"kv": "8"}], ids=["plain", "ctx", "kv"])
def test_list_dry_run_and_pull_agree_about_every_offer(monkeypatch, cards, changed):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", cards))
    settings = Settings(**changed)
    looked = picker_plans.outlook(settings, lambda line: None)
    shown = {row.name: row for row in picker_plans.plan_rows(looked, settings)}
    budget, told = room.here(settings).budget, 0
    assert isinstance(budget, Ram if not cards else int)
    for offer in offers.of_catalogue()[:: 1 if not changed else 5]:
        if offer.unsupported:
            continue
        refusal = choose.too_large(offer, budget, settings)
        target = catalog.resolve(offer.name)
        judged = pull_report.verdict(target, settings, None, force=False)
        assert judged.fits == (refusal is None), offer.name
        if refusal is not None and refusal.exit_code != 3:
            continue  # a context or a cache that this shape does not support
        assert (shown[offer.name].verdict == TOO_LARGE) == (refusal is not None), offer.name
        told += refusal is not None
    assert told > 10
