"""The fingerprint by which a conversion resumes: the same in every build, whatever the fields are called."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import torch

from localq import __version__
from localq.files.model_folder import open_model
from localq.quantize.output.folder import conversion_task, source_facts
from localq.quantize.request import LayerwiseRequest, layerwise_task
from localq.quantize.settings import Effort, Tuning
from tests.support.models.tiny_checkpoints import make_checkpoint


def digest(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def test_a_layerwise_conversion(tmp_path: Path) -> None:
    source = open_model(make_checkpoint(tmp_path, "llama"))
    request = LayerwiseRequest(
        source, tmp_path / "out", windows=[[1, 2, 3]], device=torch.device("cpu"), effort=Effort(4, 64, 1, 8, 0.01),
        tuning=Tuning(5, 6, 0.1, 0.2, 0.3), joint_tuning=Tuning(), seed=7,
    )  # fmt: skip
    effort = {"beam": 4, "columns": 64, "rounds": 1, "steps": 8, "damping": 0.01}
    tuning = {"steps": 5, "sequences": 6, "books": 0.1, "scales": 0.2, "norms": 0.3}
    joint = {"steps": 0, "sequences": 8, "books": 2e-3, "scales": 1e-3, "norms": 1e-3}
    text = hashlib.sha256(b"[[1, 2, 3]]").hexdigest()
    settings = [effort, tuning, joint, request.correction, 7, "cpu", request.bits]
    task = layerwise_task(request, [])
    assert task["localq"] == __version__
    assert task["fingerprint"] == digest(source_facts(source), [], text, settings, source.config)
    assert layerwise_task(replace(request, seed=8), [])["fingerprint"] != task["fingerprint"]


def test_settings_come_in_their_order(tmp_path: Path) -> None:
    source = open_model(make_checkpoint(tmp_path, "llama"))
    task = conversion_task(source, "bcq", [], [5_000, source.config, "text"])
    assert task["fingerprint"] == digest(source_facts(source), [], 5_000, source.config, "text")
