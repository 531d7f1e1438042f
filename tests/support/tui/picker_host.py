"""The list of models in an app, over a fake hub and a catalogue of a few."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Static

from localq import gpus
from localq.planner import offers, ram
from localq.planner.ram import Ram
from localq.settings import Settings
from localq.tui.models import picker_plans
from localq.tui.models.picker import PickerScreen
from localq.tui.models.picker_table import ModelTable
from tests.support.files import hub_server
from tests.support.files.fake_hub import FakeHub
from tests.support.tui.tui_pilot import drive, laid_out, until

MIB = 2**20
SETTINGS = Settings()
FEW = (
    *("smollm2-135m", "smollm3-3b", "qwen2.5-7b", "qwen2.5-coder-7b", "phi-4", "llama-3.1-8b", "qwen3-32b"),
    *("llama-3.3-70b", "gpt-oss-20b"),
)


class Host(App[Any]):
    """The list, and what it was dismissed with."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.picker, self.results = PickerScreen(settings), []
        self.set_keymap(settings.keys)

    def on_mount(self) -> None:
        self.push_screen(self.picker, self.results.append)


Script = Callable[[Pilot[Any], Host], Awaitable[None]]


@contextlib.contextmanager
def few_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """No GPU, 32 GiB of free RAM, an empty cache, a hub; the catalogue has `FEW`: drawing all of them takes time."""
    monkeypatch.setattr(gpus, "probe", gpus.NvmlReport)
    for module in (ram, picker_plans):
        monkeypatch.setattr(module, "free_ram", lambda dtype="auto": Ram(32 * 2**30, "float32"))
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    few = [each for each in offers.of_catalogue() if each.model in FEW]
    monkeypatch.setattr(offers, "of_catalogue", lambda: few)
    with hub_server.running(tmp_path, monkeypatch) as server:
        yield server


def picked(script: Script, size: tuple[int, int] = (120, 30), settings: Settings = SETTINGS) -> list[Any]:
    """Run `script` once the plans are there; what the picker was dismissed with, if it was."""
    host = Host(settings)

    async def run(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: host.picker._rows and "..." not in host.picker._rows[0].verdict, "plans")
        await laid_out(pilot)
        await script(pilot, host)

    drive(host, run, size=size)
    return host.results


def rows(host: Host) -> list[str]:
    """The names in the list."""
    return [row.name for row in host.picker.query_one(ModelTable).rows_shown]


def note(host: Host) -> str:
    """What stands below or beside the list, without its line breaks."""
    return " ".join(str(host.picker.query_one("#sentence", Static).render()).split())
