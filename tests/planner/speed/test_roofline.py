"""The fastest that a card could decode, worked by hand."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from localq.cli.line.session import speed_line
from localq.files import catalog
from localq.planner.speed import local_measurements, roofline
from localq.planner.speed.roofline import MEASURED, RATED, Bandwidth, Reads, Roof
from localq.stats import Stats
from localq.wording import stats_line
from localq.worker.messages import Loaded

LEDGER = {"weights": 4_000_000_000, "embedding": 1_050_673_152, "head": 1_050_673_152, "kv_cache": 99}
SLOT = 32 * 2 * 8 * 128 * 2  # of llama-3.1-8b in 16 bit: layers, k and v, kv heads, columns, bytes


@pytest.fixture
def arch():
    return catalog.find("llama-3.1-8b").arch


def test_a_step_reads_the_weights_once_the_head_a_row_of_the_table_and_the_slots_in_use(arch):
    found = roofline.reads(arch, LEDGER, 16)
    assert found == Reads(4_000_000_000 + 1_050_673_152 + 8192, SLOT)
    assert found.at(100) - found.at(0) == 100 * SLOT == 13_107_200


def test_a_table_that_is_the_head_is_read_whole(arch):
    assert roofline.reads(arch, {**LEDGER, "head": 0}, 16).weights == 4_000_000_000 + 1_050_673_152 + 8192


def test_an_8_bit_cache_is_read_as_it_is_stored(arch):
    assert roofline.reads(arch, LEDGER, 8).slot == arch.kv_bytes_per_token(8) < 0.55 * SLOT
    assert roofline.reads(arch, LEDGER, "k8v4").slot == 32 * 8 * (136 + 72)


def test_windowed_layers_read_no_more_than_their_window(arch):
    found = roofline.reads(replace(arch, window=1000, window_layers=24), LEDGER, 16)
    assert (found.slot, found.windowed_slot, found.window) == (SLOT // 4, SLOT * 3 // 4, 1000)
    assert found.at(1000) - found.at(0) == 1000 * SLOT
    assert found.at(5000) - found.at(1000) == 4000 * SLOT // 4


def test_experts_that_were_not_chosen_are_not_read(arch):
    mixture = replace(arch, experts=8, experts_active=2)
    whole, part = (roofline.reads(mixture, LEDGER, 16, idle) for idle in (0, 1_500_000_000))
    assert whole.at(7) - part.at(7) == 1_500_000_000
    assert roofline.reads(None, LEDGER, 16) is None


def test_the_roof_falls_as_the_context_fills():
    roof = Roof(Reads(9_000_000_000, 1_000_000), Bandwidth(900e9, RATED))
    assert roof.tokens_per_s(0) == 100
    assert roof.tokens_per_s(1000) == 90
    assert roof.tokens_per_s(9000) == 50


def test_what_was_measured_on_this_machine_counts_before_what_the_maker_says(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path))
    assert roofline.bandwidth("GPU-1", "NVIDIA GeForce RTX 3090") == Bandwidth(936e9, RATED)
    assert roofline.bandwidth("GPU-1", "A card of tomorrow") is None
    local_measurements.keep_bandwidth("GPU-1", 871e9)
    assert roofline.bandwidth("GPU-1", "NVIDIA GeForce RTX 3090") == Bandwidth(871e9, MEASURED)
    assert roofline.bandwidth("GPU-2", "NVIDIA GeForce RTX 3090") == Bandwidth(936e9, RATED)


def test_a_reply_is_told_as_its_share_of_what_the_card_allows(monkeypatch):
    roof = Roof(Reads(9_000_000_000, 1_000_000), Bandwidth(900e9, MEASURED))
    stats = Stats("done", generated_tokens=201, decode_s=4.0, context_used=1100, context_size=4096)  # 50 tok/s
    assert roof.share(stats) == pytest.approx(50 / 90)  # at 1000 positions
    assert roof.text(stats) == "56% of the bandwidth limit (900 GB/s)"
    rated = replace(roof, bandwidth=Bandwidth(900e9, RATED))
    assert rated.text(stats) == "56% of the bandwidth limit (900 GB/s, rated)"
    assert roof.text(Stats()) == ""
    assert "50.0 tok/s = 56% of the bandwidth limit" in stats_line(stats, roof.text(stats))
    held = Loaded("m", "cuda", "GPU", "bf16", "nf4", 4096, 9, True, 0.0, gpu_uuid="u", reads={"weights": 9, "slot": 1})
    monkeypatch.setattr(roofline, "bandwidth", lambda uuid, name: Bandwidth(900e9, MEASURED))
    assert roofline.model_roof(held) == Roof(Reads(9, 1), Bandwidth(900e9, MEASURED))
    assert speed_line(stats, replace(held, reads=dataclasses.asdict(roof.reads))).count(roof.text(stats)) == 1
    assert roofline.model_roof(replace(held, reads={})) is None
