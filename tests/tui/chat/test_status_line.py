"""The line of what goes on: what it says in each phase, and what it leaves out where it is narrow."""

from __future__ import annotations

import pytest
from rich.cells import cell_len

from localq.stats import Stats
from localq.tui.chat.status_line import ASKING, SPINNER, Status, StatusLine, line, phase, short_name, transfer_text
from localq.tui.gauge import BAD, FAIR, GOOD, gauge, rising
from tests.support.tui.tui_pilot import HostApp, chat_app, drive, drive_chat, screen_text, until

ANSWERING = Stats("decode", 100, 20, 80, 33, 0.25, 0.25, 0.5, 140, 1000)
FULL = Status(stats=ANSWERING, model="llama-3.1-8b", format="nf4", device="NVIDIA H200")


def test_phases():
    assert phase(Status(doing="loading")) == "loading"
    assert phase(Status(stats=Stats("prefill", 200, 50, 50))) == "processing the prompt 50%"
    assert phase(Status(stats=ANSWERING)) == "answering"
    assert phase(Status(stats=ANSWERING, thinking=True)) == "thinking"
    assert phase(Status(stats=ANSWERING, stopping=True, thinking=True)) == "stopping"
    assert phase(Status(doing="ready", stats=ANSWERING)) == "ready"


def test_what_is_transferred():
    assert transfer_text("loading weights", 490, 1000) == "loading weights 49% of 1.0 kB"
    assert transfer_text("capturing", 0, 0) == "capturing"


def drawn(share: float) -> str:
    return "".join(text for text, _ in gauge(share, 4, GOOD))


def test_a_gauge_fills_in_halves_and_is_never_empty_above_zero():
    assert [drawn(each) for each in (0, 1, 0.5, 0.4, 0.001, 7, -1)] == [
        "────", "━━━━", "━━──", "━╸──", "╸───", "━━━━", "────",
    ]  # fmt: skip
    assert [rising(each, 0.75, 0.9) for each in (0, 0.74, 0.75, 0.9)] == [GOOD, GOOD, FAIR, BAD]


def test_all_of_it_where_there_is_room():
    shown = line(FULL, 100).plain
    assert shown.startswith(" answering  │ llama-3.1-8b │ nf4 │ H200   ")
    assert shown.endswith("   context 14% │ ━╸──────── │ 64.0 tok/s │ first token 0.25 s")
    assert len(shown) == 100


def test_with_drafts_the_tokens_of_a_step_are_told():
    drafted = Stats(
        **{**ANSWERING.to_dict(), "decode_steps": 16, "drafted": {"lookup": 40}, "accepted": {"lookup": 16}}
    )
    shown = line(Status(stats=drafted, model="llama-3.1-8b"), 110).plain
    assert "64.0 tok/s │ 2.0 tokens per step │ first token 0.25 s" in shown
    assert "per step" not in line(FULL, 110).plain


def test_a_full_context_is_shown_by_colour():
    def styles(used: int) -> str:
        return repr(line(Status(stats=Stats("decode", context_used=used, context_size=1000)), 80).spans)

    assert GOOD in styles(300)
    assert FAIR in styles(800)
    assert BAD in styles(950)


def test_the_name_of_a_model_without_folder_and_format():
    assert [short_name(each) for each in ("qwen3-32b@nf4", "/a/b/model.gguf", "org/repo", "")] == [
        "qwen3-32b", "model.gguf", "repo", "",
    ]  # fmt: skip


@pytest.mark.parametrize("width", range(0, 120))
def test_it_never_is_wider_than_its_place_and_drops_the_least_first(width):
    shown = line(FULL, width).plain
    assert cell_len(shown) <= width
    order = ["H200", "nf4", "━╸─", "first token", "llama-3.1-8b", "context 14%", "64.0 tok/s"]
    missing = [part not in shown for part in order]
    assert missing == sorted(missing, reverse=True)


def test_how_to_get_help_is_told_where_there_is_room_and_goes_first():
    ready = Status(doing="ready", model="phi-4", hint="F1 help")
    assert line(ready, 80).plain.rstrip() == " ready  │ phi-4 │ F1 help"
    assert line(ready, 22).plain.rstrip() == " ready  │ phi-4"


@pytest.mark.parametrize(("keys", "hint"), [({}, "F1 help"), ({"help": "f9,ctrl+w"}, "F9 help")])
def test_the_key_of_the_help_is_the_one_that_was_set(keys, hint):
    app = chat_app([], keys=keys)

    async def script(pilot):
        assert hint in screen_text(app).splitlines()[-2]  # the lower border of the prompt

    drive_chat(app, script)


def test_where_the_prompt_has_no_border_the_status_line_shows_the_key_of_the_help():
    app = chat_app([])

    async def script(pilot):
        assert "F1 help" in screen_text(app).splitlines()[-1]

    drive_chat(app, script, (60, 12))


def test_a_spinner_and_the_seconds_are_beside_what_goes_on():
    ticks: list[str] = []
    shown = StatusLine(on_tick=ticks.append)
    app = HostApp(shown)

    async def script(pilot):
        shown.status = Status(doing="sending")
        assert ticks[-1].startswith("sending ")
        assert ticks[-1][-1] in SPINNER
        await until(pilot, lambda: ticks[-1].endswith(" 1 s"))
        frames = {each.split()[1] for each in ticks if each.startswith("sending")}
        assert len(frames) > 4
        shown.status = Status(doing="ready")
        assert ticks[-1] == "ready"
        count = len(ticks)
        await pilot.pause(0.3)
        assert len(ticks) == count  # nothing is drawn at rest

    drive(app, script)


def test_a_wide_name_is_cut_by_cells_and_what_acts_on_a_terminal_is_left_out():
    assert cell_len(line(Status(doing="モデルを読み込む"), 5).plain) <= 5
    assert "\x1b" not in line(Status(model="a\x1b[2Jb\nc"), 50).plain


def test_nothing_runs_while_localq_waits_for_the_user():
    assert not Status(doing=ASKING).is_working


def test_the_key_of_the_help_moves_to_the_border_when_the_screen_grows():
    app = chat_app([])

    async def script(pilot):
        for size, place, other in (((60, 24), -2, -1), ((60, 12), -1, -2), ((60, 30), -2, -1)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda place=place: "F1 help" in screen_text(app).splitlines()[place])
            assert "F1 help" not in screen_text(app).splitlines()[other]

    drive_chat(app, script, (60, 12))
