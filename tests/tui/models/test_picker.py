"""The model picker: rows with verdicts, filter, order, opening; by keys and by mouse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Static

from localq import gpus
from localq.gpus import Gpu, NvmlReport
from localq.planner import card as planner_card
from localq.settings import Settings
from localq.tui.key_line import KeyLine
from localq.tui.models.picker import PickedModel
from localq.tui.models.picker_dialogs import DetailsScreen, ForceScreen, RemoveScreen
from localq.tui.models.picker_table import ModelTable
from tests.support.files import cached_models, fake_hub
from tests.support.files import uncatalogued_models as unlisted_models
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.tui.picker_host import FEW, MIB, Host, few_models, picked, rows
from tests.support.tui.tui_pilot import drive, screen_text, until


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[FakeHub]:
    with few_models(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def card(monkeypatch, server) -> None:
    """A card of 24 GB, most of it free, as fast as was measured."""
    gpu = Gpu(0, "NVIDIA GeForce RTX 3090", "GPU-1", (8, 6), 24_564 * MIB, 23_000 * MIB, None)
    monkeypatch.setattr(gpus, "probe", lambda: NvmlReport("580", (gpu,)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(planner_card, "measure_bandwidth", lambda: 8.5e11)


def test_the_names_are_there_before_anything_is_planned(server, monkeypatch):
    monkeypatch.setattr("localq.tui.jobs.job.Job.start", lambda self: None)
    cached_models.put(REPO, fake_hub.model_files())
    host = Host(Settings())

    async def script(pilot: Pilot[Any]) -> None:
        assert rows(host)[0] == REPO
        assert {*FEW} <= {row.name for row in host.picker._rows}
        shown = host.picker.query_one(ModelTable).rows_shown[1:]
        assert sorted(row.family for row in shown) == ["gpt-oss", "llama", "phi", "qwen", "qwen-coder", "smollm"]
        assert "on disk" in screen_text(host)

    drive(host, script)
    assert server.requests == []


@pytest.mark.usefixtures("card")
def test_what_fits_is_said_in_words_with_context_and_speed(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        text = screen_text(host)
        assert "RTX 3090: 8,188 MiB available (--vram 8)" in text
        best = host.picker._rows[0]
        assert best.verdict == "fits"
        assert best.ctx > 4096
        assert best.tok_s > 5
        assert f"{best.ctx:,}" in text
        assert best.sentence in str(host.picker.query_one("#sentence", Static).content)  # the cursor stands on it
        words = {row.verdict for row in host.picker._rows}
        assert {"fits", "too large"} <= words
        assert host.picker._rows[-1].verdict == "too large"
        assert host.picker._rows[-1].why
        assert "GB to download" in text
        assert "850 GB/s, measured" in text

    picked(script, settings=Settings(vram="8"))
    assert server.requests == []  # nothing is asked of the hub


def test_without_a_gpu_the_plans_say_so(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        assert "On the CPU (no NVIDIA GPU)" in screen_text(host)
        assert "on the CPU" in screen_text(host)
        large = next(row for row in host.picker._rows if row.name == "llama-3.3-70b")
        assert large.verdict == "too large"
        assert "free" in large.why

    picked(script)


def test_what_is_here_comes_first_and_is_planned_by_its_files(server):
    cached_models.put("maker/sound", unlisted_models.model())
    cached_models.put("maker/odd", {**fake_hub.model_files(), "config.json": b'{"model_type": "what"}'})

    async def script(pilot: Pilot[Any], host: Host) -> None:
        found = {row.name: row for row in host.picker._rows[:2]}
        assert found["maker/sound"].verdict == "on the CPU"
        assert found["maker/odd"].verdict == "unreadable"
        assert "what" in found["maker/odd"].why

    picked(script)


def test_typing_filters_and_enter_picks(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"coder")
        assert rows(host)
        assert all("coder" in name for name in rows(host))
        await pilot.press(*" 7b", "enter")

    assert picked(script) == [PickedModel("qwen2.5-coder-7b", "nf4")]


def test_escape_empties_the_filter_and_then_leaves(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"phi", "down", "escape")
        assert host.picker.query_one(Input).value == ""
        assert host.results == []
        await pilot.press("escape")

    assert picked(script) == [None]


@pytest.mark.parametrize("text", ["maker/some-model", "llama-3.1-8b@vq2"])
def test_a_name_that_is_no_row_is_taken_as_typed(server, text):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*text, "enter")

    assert picked(script) == [PickedModel(text, None)]
    assert server.requests == []


def test_a_file_is_taken_and_a_name_that_nothing_has_is_refused(server, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")

    async def script(pilot: Pilot[Any], host: Host) -> None:
        host.picker.query_one(Input).value = "no-such-model"
        await pilot.pause()
        assert "Press Enter to open" in screen_text(host)
        await pilot.press("enter")
        assert "no-such-model" in screen_text(host)
        assert host.results == []
        host.picker.query_one(Input).value = str(path)
        await pilot.pause()
        await pilot.press("enter")

    assert picked(script) == [PickedModel(str(path), None)]


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize("by_mouse", [True, False])
def test_what_is_too_large_is_opened_against_the_plan_after_a_question(server, by_mouse):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"llama-3.3-70b", "down", "f")
        await until(pilot, lambda: isinstance(host.screen, ForceScreen))
        await pilot.pause()
        row = host.picker.row
        assert row.verdict == "too large"
        asked = " ".join(screen_text(host).replace("\u2502", " ").split())
        assert f"Plan: too large; {row.why}." in asked
        await pilot.press("enter")  # what has the focus leaves it
        await until(pilot, lambda: host.screen is host.picker)
        assert host.results == []
        await pilot.press("f")
        await until(pilot, lambda: isinstance(host.screen, ForceScreen))
        await (pilot.click("#yes") if by_mouse else pilot.press("y"))
        await until(pilot, lambda: host.results)

    assert picked(script, settings=Settings(vram="8")) == [PickedModel("llama-3.3-70b@vq2", None, force=True)]


@pytest.mark.usefixtures("card")
def test_what_fits_is_not_forced(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"smollm2", "down", "f")
        await until(pilot, lambda: "smollm2-135m: fits)" in screen_text(host))
        assert host.screen is host.picker
        await pilot.press("enter")

    assert picked(script)[0].force is False


def test_its_keys_can_be_set_and_are_told_as_they_are(server):
    cached_models.put(REPO, fake_hub.model_files())
    keys = {"picker_details": "x", "picker_delete": "f9", "details_leave": "z", "question_no": "z", "picker_open": "o"}

    async def script(pilot: Pilot[Any], host: Host) -> None:
        await pilot.press(*"tiny", "down", "i")
        await pilot.pause()
        assert host.screen is host.picker
        await pilot.press("x")
        await until(pilot, lambda: isinstance(host.screen, DetailsScreen))
        await pilot.pause()
        assert "Back (z)" in screen_text(host)
        await pilot.press("z")
        await until(pilot, lambda: host.screen is host.picker)
        await pilot.press("d", "f9")
        await until(pilot, lambda: isinstance(host.screen, RemoveScreen))
        await pilot.pause()
        assert "Keep (z)" in screen_text(host)
        await pilot.press("z")
        await until(pilot, lambda: host.screen is host.picker)
        await pilot.press("enter")
        assert host.results == []
        await pilot.press("o")

    assert [each.name for each in picked(script, settings=Settings(keys=keys))] == [REPO]


@pytest.mark.usefixtures("card")
def test_orders_by_key_and_by_heading(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        best = rows(host)
        await pilot.press("down", "s")
        assert rows(host) == sorted(best)
        assert "By name" in screen_text(host)
        await pilot.press("s")
        speeds = [row.tok_s or 0 for row in host.picker.query_one(ModelTable).rows_shown]
        assert speeds == sorted(speeds, reverse=True)
        table = host.picker.query_one(ModelTable)
        headings = screen_text(host).splitlines()[table.region.y]
        assert await pilot.click(ModelTable, offset=(headings.index("CONTEXT"), 0))
        await pilot.pause()
        contexts = [row.ctx or 0 for row in table.rows_shown]
        assert contexts == sorted(contexts, reverse=True)

    picked(script)


@pytest.mark.usefixtures("card")
def test_one_line_stands_for_a_family_and_typing_finds_all_its_models(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        table = host.picker.query_one(ModelTable)
        assert [row.family for row in table.rows_shown].count("llama") == 1
        best = table.rows_shown[0]
        assert (best.family, best.score) == ("qwen", "1345")
        assert best.tok_s_full < best.tok_s
        made = next(row for row in host.picker._rows if row.name == "llama-3.3-70b@vq2")
        assert made.place == "141.1 GB to download, 108 min to quantize"
        assert ("perplexity not measured" in made.sentence, made.year) == (True, 2024)
        await pilot.press(*"llama")
        await pilot.pause()
        assert [row.model for row in table.rows_shown] == ["llama-3.3-70b", "llama-3.1-8b"]

    picked(script)


@pytest.mark.usefixtures("card")
def test_every_format_and_back(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        few = len(rows(host))
        await pilot.press("down", "a")
        await until(pilot, lambda: len(rows(host)) > 2 * few)
        assert "every format" in screen_text(host)
        await pilot.press("a")
        await until(pilot, lambda: len(rows(host)) == few)

    picked(script)


def test_a_click_chooses_and_a_double_click_opens(server):
    async def script(pilot: Pilot[Any], host: Host) -> None:
        names = rows(host)
        await pilot.click(ModelTable, offset=(3, 4))  # below the headings and the name of the group
        assert host.results == []
        assert host.picker.row.name == names[2]
        await pilot.click(ModelTable, offset=(3, 3), times=2)
        await until(pilot, lambda: host.results)
        assert host.results[0].name == names[1]

    picked(script)


def test_nothing_slow_is_imported_for_the_first_frame():
    slow = ("torch", "transformers", "numpy", "huggingface_hub", "httpx", "psutil", "tokenizers")
    modules = ", ".join(
        f"localq.tui.{name}" for name in ("models.picker", "dialogs.settings_screen", "chat.sessions_panel")
    )
    code = f"import sys, {modules}; print([each for each in {slow} if each in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_damaged_catalogue_of_the_user_is_said(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("models.toml").write_text("[[model]\n")
    monkeypatch.setenv("LOCALQ_MODELS", "models.toml")  # a name that stays on one line
    host = Host(Settings())

    async def script(pilot: Pilot[Any]) -> None:
        await until(pilot, lambda: "models.toml" in screen_text(host))

    drive(host, script)


def test_a_click_on_each_key_of_the_line_does_what_the_key_does(server):
    async def script(pilot: Pilot[Any], app: Host) -> None:
        line, table = app.screen.query_one(KeyLine), app.screen.query_one(ModelTable)

        async def click(label: str) -> None:
            assert await pilot.click(line, offset=(1 + line.render().plain.index(label), 0))

        await until(pilot, lambda: table.row_count)
        await click("Down list")
        await until(pilot, lambda: table.has_focus and "Esc back  Enter" in line.render().plain)
        count = table.row_count
        await click("a all")
        await until(pilot, lambda: table.row_count > count)
        best_first = rows(app)
        await click("s sort")
        await until(pilot, lambda: rows(app) == sorted(best_first, key=str.casefold))
        await click("i details")
        await until(pilot, lambda: isinstance(app.screen, DetailsScreen))
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, DetailsScreen))
        await click("/ filter")
        await until(pilot, lambda: isinstance(app.focused, Input))
        assert app.focused.value == ""
        await click("Esc back")
        await until(pilot, lambda: app.results)

    assert picked(script, size=(140, 30)) == [None]
