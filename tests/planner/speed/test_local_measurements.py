"""What is remembered of this machine comes back, and damage or a full disk mean no more than measuring again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from localq.planner.speed import local_measurements
from localq.planner.speed.local_measurements import LoadMemory

LOAD = LoadMemory("NVIDIA H200", "nf4", 4096, 16, "device", "16", {"weights": 10}, {"weights": 11})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_both_kinds_come_back_and_the_last_counts():
    assert local_measurements.bandwidth("GPU-a") is None
    local_measurements.keep_bandwidth("GPU-a", 4.42e12)
    local_measurements.keep_bandwidth("GPU-b", 9e11)
    local_measurements.keep_load("m", LOAD)
    local_measurements.keep_load("m", replace(LOAD, ctx=8192))
    local_measurements.keep_bandwidth("GPU-a", 4.4e12)
    assert (local_measurements.bandwidth("GPU-a"), local_measurements.bandwidth("GPU-b")) == (4.4e12, 9e11)
    assert local_measurements.last_load("m") == replace(LOAD, ctx=8192)
    assert local_measurements.last_load("n") is None


def test_only_so_many_are_kept():
    for number in range(local_measurements.MOST + 5):
        local_measurements.keep_load(f"m{number}", LOAD)
    assert local_measurements.last_load("m4") is None
    assert local_measurements.last_load("m5") == local_measurements.last_load(f"m{local_measurements.MOST + 4}") == LOAD


@pytest.mark.parametrize("text", [
    "", "[]", "{", '{"bandwidth": 3, "loads": []}', '{"bandwidth": {"GPU-a": "fast"}, "loads": {"m": {"ctx": 1}}}',
    '{"bandwidth": {"GPU-a": -1}, "loads": {"m": 7}}',
    json.dumps({"loads": {"m": {**vars(LOAD), "predicted": 3}}}),
    json.dumps({"loads": {"m": {**vars(LOAD), "kv_bits": "k4v8"}}}),
    json.dumps({"loads": {"m": {**vars(LOAD), "measured": {"weights": "11"}}}}),
])  # fmt: skip
def test_damage_is_as_if_nothing_was_there(folder, text):
    folder.mkdir()
    (folder / local_measurements.FILE).write_text(text)
    assert (local_measurements.bandwidth("GPU-a"), local_measurements.last_load("m")) == (None, None)
    local_measurements.keep_load("m", LOAD)
    assert local_measurements.last_load("m") == LOAD


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    local_measurements.keep_bandwidth("GPU-a", 1e12)
    assert local_measurements.bandwidth("GPU-a") is None
