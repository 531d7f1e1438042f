"""What sends people to `localq fit` names a command that works, also where no GPU is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from localq import gpus
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.gpus import Gpu, NvmlReport
from localq.models.config import unsupported_error
from localq.planner import card as planner_card
from localq.planner import pull_report
from localq.settings import Settings

ROOT = Path(__file__).parents[3]
MIB = 2**20
WITHOUT = "`localq fit --vram 24 --all`"


def sending_to_fit() -> dict[str, str]:
    """What each place says that sends people to `localq fit`."""
    told = {"config": unsupported_error("key", 1).next_step or ""}
    for name in ("completely-unheard-of", ""):
        with pytest.raises(LocalqError) as raised:
            catalog.resolve(name)
        told[name] = raised.value.next_step or ""
    return told


@pytest.mark.parametrize("total", [None, 24_564 * MIB])
def test_what_sends_people_to_fit_names_a_command_that_works(capsys, monkeypatch, tmp_path, total):
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    known = () if total is None else (Gpu(0, "card", "GPU-a", (8, 9), total, total, None),)
    monkeypatch.setattr(gpus, "probe", lambda: NvmlReport("580", known))
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    told = sending_to_fit()
    for verb in (["show"], ["show", "completely-unheard-of"], ["pull", "completely-unheard-of"]):
        assert execute(verb) in (ExitCode.USAGE, ExitCode.UNKNOWN_MODEL)
        told[" ".join(verb)] = capsys.readouterr().err
    refused = pull_report.verdict(catalog.resolve("qwen3-32b"), Settings(vram="12"), None, force=False)
    assert refused is not None
    assert refused.refusal is not None
    told["pull"] = refused.refusal.next_step or ""
    for place, text in told.items():
        assert (WITHOUT in text, "`localq fit`" in text) == (total is None, total is not None), (place, text)
    command = re.search("`localq (fit[^`]*)`", told["config"])
    assert command is not None
    assert execute(command[1].split()) == ExitCode.OK


def test_no_other_text_sends_people_to_fit_alone():
    """`gpus.fit_command` is the one place that names the command."""
    found = set()
    for path in (ROOT / "localq").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in documents)
        if any("`localq fit` lists" in str(node.value) or "`localq fit` list" in str(node.value) for node in texts):
            found.add(str(path.relative_to(ROOT)))
    assert found == set()
