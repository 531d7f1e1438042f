"""`localq fit` and speed: of a card by name, by size or by bandwidth, and of the GPU that is here."""

from __future__ import annotations

import json

import pytest

from localq import gpus
from localq.cli import execute
from localq.errors import ExitCode
from localq.planner import card as planner_card

MIB = 2**20
NAMED = gpus.Gpu(0, "NVIDIA GeForce RTX 4070", "GPU-c", (8, 9), 12_282 * MIB, 12_000 * MIB, None)
UNKNOWN = gpus.Gpu(0, "card", "GPU-a", (8, 9), 12_282 * MIB, 12_000 * MIB, None)


@pytest.fixture(autouse=True)
def shipped_catalogue_only(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def fit_json(capsys, *arguments: str) -> dict:
    assert execute(["fit", "--json", *arguments]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_speed_is_that_of_the_card_that_is_meant(capsys):
    def rates(*arguments: str) -> tuple[dict, dict]:
        body = fit_json(capsys, *arguments)
        return body, {row["name"]: row["tok_s"] for row in body["rows"]}

    body, usual = rates("--vram", "24")
    assert (body["gpu"], "RTX 4090" in body["tok_s_basis"], "H200" in body["tok_s_basis"]) == (None, True, True)
    body, slower = rates("--gpu", "rtx 3090")
    assert (body["gpu"], body["vram_bytes"]) == ("RTX 3090", 24_564 * MIB)
    body, faster = rates("--vram", "24", "--bandwidth", "2000")
    assert body["read_bytes_per_s"] == 2_000_000_000_000
    for name in ("qwen3-32b", "llama-3.3-70b@vq2", "llama-3.1-8b@bf16"):
        assert slower[name] < usual[name] < faster[name]
    assert 20 < slower["llama-3.3-70b@vq2"] < 49  # no faster than its bytes
    assert usual["qwen3-30b-a3b"] > 3 * usual["qwen3-32b"]  # of as many weights a tenth is active
    assert usual["gpt-oss-20b"] > 2 * usual["mistral-small-24b"]
    body, unknown = rates("--vram", "20GiB")
    assert set(unknown.values()) == {None}
    assert "not predicted" in body["tok_s_basis"]


def test_the_bandwidth_of_a_gpu_is_measured_once(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (UNKNOWN,)))
    runs = []
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: runs.append(1) or 9.1e11)
    bodies = [fit_json(capsys) for _ in range(3)]
    assert len(runs) == 1
    assert {body["read_bytes_per_s"] for body in bodies} == {910_000_000_000}
    assert "predicted for card (910 GB/s, measured)" in bodies[2]["tok_s_basis"]
    assert fit_json(capsys, "--bandwidth", "500")["read_bytes_per_s"] == 5e11


def test_a_gpu_that_cannot_be_measured_has_no_speed_or_that_of_its_name(capsys, monkeypatch):
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (UNKNOWN,)))
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: None)
    body = fit_json(capsys)
    assert body["read_bytes_per_s"] is None
    assert {row["tok_s"] for row in body["rows"]} == {None}
    monkeypatch.setattr(gpus, "probe", lambda: gpus.NvmlReport("580", (NAMED,)))
    assert "predicted for RTX 4070 (464 GB/s, expected)" in fit_json(capsys)["tok_s_basis"]
