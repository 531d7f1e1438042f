"""The line of what goes on: what it says in each phase, and what it leaves out where it is narrow."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from localq.stats import Stats
from localq.tui.chat.status_line import Status, bar, line, phase, transfer_text
from tests.support.tui.tui_pilot import chat_app, drive_chat, screen_text

ANSWERING = Stats("decode", 100, 20, 80, 33, 0.25, 0.25, 0.5, 140, 1000)
FULL = Status(stats=ANSWERING, model="llama-3.1-8b", format="nf4", device="NVIDIA H200")


def test_phases():
    assert phase(Status(doing="loading")) == "loading"
    assert phase(Status(stats=Stats("prefill", 200, 50, 50))) == "reading the prompt 50%"
    assert phase(Status(stats=ANSWERING)) == "answering"
    assert phase(Status(stats=ANSWERING, thinking=True)) == "thinking"
    assert phase(Status(stats=ANSWERING, stopping=True, thinking=True)) == "stopping"
    assert phase(Status(doing="ready", stats=ANSWERING)) == "ready"


def test_what_is_transferred():
    assert transfer_text("reading weights", 490, 1000) == "reading weights 49% of 1.0 kB"
    assert transfer_text("capturing", 0, 0) == "capturing"


def test_the_bar_fills_in_eighths():
    assert bar(0, 4) == "░░░░"
    assert bar(1, 4) == "████"
    assert bar(0.5, 4) == "██░░"
    assert bar(1 / 32, 4) == "▏░░░"
    assert bar(7, 4) == "████"


def test_all_of_it_where_there_is_room():
    assert line(FULL, 200) == (
        "answering │ context 14% │ █▍░░░░░░░░ │ 64.0 tok/s │ first token 0.25 s │ llama-3.1-8b │ nf4 │ NVIDIA H200"
    )


@pytest.mark.parametrize("width", range(0, 120))
def test_it_never_is_wider_than_its_place_and_drops_the_least_first(width):
    shown = line(FULL, width)
    assert cell_len(shown) <= width
    order = ["NVIDIA H200", "nf4", "█▍░", "first token", "llama-3.1-8b", "context 14%", "64.0 tok/s"]
    missing = [part not in shown for part in order]
    assert missing == sorted(missing, reverse=True)


def test_how_to_get_help_is_told_where_there_is_room_and_goes_first():
    ready = Status(doing="ready", model="phi-4", hint="F1 help")
    assert line(ready, 80) == "ready │ phi-4 │ F1 help"
    assert line(ready, 22) == "ready │ phi-4"


@pytest.mark.parametrize(("keys", "hint"), [({}, "F1 help"), ({"help": "f9,ctrl+w"}, "F9 help")])
def test_the_key_of_the_help_is_the_one_that_was_set(keys, hint):
    app = chat_app([], keys=keys)

    async def script(pilot):
        assert hint in screen_text(app).splitlines()[-1]

    drive_chat(app, script)


def test_a_wide_name_is_cut_by_cells_and_what_acts_on_a_terminal_is_left_out():
    assert cell_len(line(Status(doing="モデルを読み込む"), 5)) == 5
    assert "\x1b" not in line(Status(model="a\x1b[2Jb\nc"), 50)
