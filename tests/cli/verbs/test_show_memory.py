"""`localq show` and memory: as planned before the first load, then predicted and allocated side by side."""

from __future__ import annotations

import json

import pytest

from localq import gpus
from localq.chat import commands, open_model
from localq.chat.history.conversation import Conversation
from localq.cli import execute
from localq.cli.line import session
from localq.cli.line.command_host import TerminalHost
from localq.drafts import MOST
from localq.errors import ExitCode
from localq.files import catalog
from localq.planner import placement, room
from localq.planner import plan as memory_plan
from localq.planner.speed import local_measurements
from localq.wording import memory_lines
from localq.worker.messages import Loaded

MIB = 2**20
WATCHER = session.TerminalWatcher(quiet=True)
LEDGER = {"weights": 3500 * MIB, "kv_cache": 1024 * MIB, "graphs": 3 * MIB}
PREDICTED = {"weights": 3500 * MIB, "kv_cache": 1024 * MIB, "scratch": 2 * MIB}


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    for name, path in (("LOCALQ_MODELS", "none.toml"), ("LOCALQ_CACHE", "cache"), ("LOCALQ_CONFIG", "config.toml"),
                       ("HF_HUB_CACHE", "hub"), ("LOCALQ_DATA", "data")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / path))
    monkeypatch.setattr(gpus, "probe", gpus.NvmlReport)


def loaded(device: str = "cuda") -> Loaded:
    return Loaded("llama-3.1-8b", device, "NVIDIA H200", "bfloat16", "nf4", 8192, 128_256, True, 2.0, LEDGER,
                  predicted=PREDICTED)  # fmt: skip


class FakeSession:
    """What `load_now` and `/stats` need."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded, self.last, self._answer = None, None, loaded
        self.conversation = Conversation()

    def ensure_loaded(self, on_event) -> Loaded:
        self.loaded = self._answer
        return self._answer


def opened(answer: Loaded) -> open_model.OpenSession:
    return open_model.OpenSession(FakeSession(answer), object())


def shown(capsys, *arguments: str) -> dict:
    assert execute(["show", "llama-3.1-8b", "--json", *arguments]) == ExitCode.OK
    return json.loads(capsys.readouterr().out)["memory"]


def test_without_a_gpu_nothing_is_told_and_with_a_size_the_plan(capsys):
    assert shown(capsys) is None
    told = shown(capsys, "--vram", "8")
    arch, budget = catalog.find("llama-3.1-8b").arch, 8188 * MIB - room.DESKTOP_BYTES
    plan = memory_plan.assess(arch, "nf4", budget, wishes=placement.Wishes(draft_tokens=MOST))
    assert (told["ctx"], told["predicted_bytes"], told["measured_bytes"]) == (plan.ctx, plan.ledger.components, None)
    assert execute(["show", "llama-3.1-8b", "--vram", "8"]) == ExitCode.OK
    assert "as planned" in capsys.readouterr().out


def test_after_a_load_on_a_gpu_both_stand_side_by_side(capsys):
    open_model.load_now(opened(loaded()), WATCHER)
    told = shown(capsys)
    assert (told["device"], told["predicted_bytes"], told["measured_bytes"]) == ("NVIDIA H200", PREDICTED, LEDGER)
    assert execute(["show", "llama-3.1-8b"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "at the last load on NVIDIA H200" in out
    (line,) = (line for line in out.splitlines() if line.strip().startswith("total"))
    assert line.split() == ["total", "4,527.0", "4,526.0"]


def test_a_load_on_the_cpu_is_no_measure_of_a_gpu():
    open_model.load_now(opened(loaded("cpu")), WATCHER)
    assert local_measurements.last_load("llama-3.1-8b") is None
    assert session.memory_line(loaded("cpu")) == ""


def test_stats_say_both():
    assert session.memory_line(loaded()) == "[memory 4.42 GiB, predicted 4.42 GiB, +0.0 %]"
    opened_now = opened(loaded())
    open_model.load_now(opened_now, WATCHER)
    text = commands.stats(opened_now.session, "", TerminalHost())
    assert "allocated   predicted" in text
    assert "scratch                      0.0         2.0" in text
    assert memory_lines({"weights": MIB}, {}) == ["  weights                    1.0 MiB"]


def test_memory_of_the_host_that_no_component_counts_is_a_line_of_its_own():
    told = memory_lines({"weights": MIB}, {"weights": MIB}, {"snapshots": 64 * MIB, "embedding": 0, "other": 3 * MIB})
    assert told[-1] == "  host memory: up to 64.0 MiB for copying snapshots, 3.0 MiB for other"
    assert told[:-1] == memory_lines({"weights": MIB}, {"weights": MIB}, {})
