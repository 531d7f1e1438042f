"""The columns of the list of models: those that there is room for, whole; what is left out stands in words below."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from localq.planner import offers
from localq.tui.models.model_card import card
from localq.tui.models.picker_rows import FITS, GROUPS, ON_CPU, TOO_LARGE, PickerRow, grouped
from localq.tui.models.picker_table import ModelTable
from tests.support.tui.tui_pilot import HostApp, drive, screen_text
from tests.tools.golden_screens import ROWS


@pytest.mark.parametrize(
    ("columns", "headings"),
    [
        (140, "MODEL SCORE FORMAT VERDICT MEMORY CONTEXT TOK/S WHEN_FULL WHERE"),
        (100, "MODEL FORMAT VERDICT MEMORY CONTEXT TOK/S WHEN_FULL WHERE"),
        (80, "MODEL FORMAT VERDICT CONTEXT TOK/S WHERE"),
        (61, "MODEL VERDICT CONTEXT TOK/S"),
        (38, "MODEL VERDICT"),
        (20, "MODEL"),
        (7, "MODEL"),
    ],
)
def test_no_column_is_cut_where_there_is_no_room_for_all(columns, headings):
    app = HostApp(ModelTable())

    async def script(pilot: Pilot[Any]) -> None:
        table = app.query_one(ModelTable)
        table.show(ROWS)
        assert table.rows_shown == ROWS
        await pilot.resize_terminal(columns, 24)
        await pilot.pause()
        assert [str(each.label).replace(" ", "_") for each in table.ordered_columns] == headings.split()
        assert table.max_scroll_x == 0
        for line, row in zip(screen_text(app).splitlines()[1:], ROWS, strict=False):
            name = line[1:].split("  ")[0].rstrip()
            assert name == row.name or (name.endswith("…") and row.name.startswith(name[:-1]))
        await pilot.resize_terminal(141, 24)
        await pilot.pause()
        assert len(table.ordered_columns) == 9
        assert ROWS[-1].name in screen_text(app)

    drive(app, script, size=(90, 24))


def test_a_column_in_which_nothing_is_told_goes_before_all_others():
    rows = [PickerRow("a-model", "gguf", ON_CPU, ctx=8192), PickerRow("another", "nf4", ON_CPU, ctx=4096)]
    app = HostApp(ModelTable())

    async def script(pilot: Pilot[Any]) -> None:
        table = app.query_one(ModelTable)
        table.show(rows)
        assert [str(each.label) for each in table.ordered_columns] == ["MODEL", "FORMAT", "VERDICT", "CONTEXT", "WHERE"]

    drive(app, script, size=(56, 24))


def test_groups_have_names_over_which_the_cursor_passes():
    app = HostApp(ModelTable())

    async def script(pilot: Pilot[Any]) -> None:
        table = app.query_one(ModelTable)
        table.show(grouped(ROWS))
        table.focus()
        await pilot.pause()
        seen = [table.row.name]
        for _ in range(len(ROWS)):
            await pilot.press("down")
            seen.append(table.row.name)
        order = ["smollm2-135m", "qwen3-32b", ROWS[-1].name, "llama-3.3-70b", "phi-4", "gpt-oss-20b"]
        assert seen == [*order, order[-1]]
        for name in order[-2::-1]:
            await pilot.press("up")
            assert table.row.name == name
        text = screen_text(app)
        assert [line.strip() for line in text.splitlines() if line.strip() in GROUPS] == [
            "On disk", "Fits", "Short context", "Too large", "Not supported",
        ]  # fmt: skip
        assert "● fits" in text
        assert "○ too large" in text

    drive(app, script, size=(100, 24))


def test_the_memory_is_a_gauge_with_its_size():
    rows = [PickerRow("a", "nf4", FITS, needs=8_000_000_000, share=0.5), PickerRow("b", "nf4", TOO_LARGE)]
    app = HostApp(ModelTable())

    async def script(pilot: Pilot[Any]) -> None:
        app.query_one(ModelTable).show(rows)
        await pilot.pause()
        assert "━━━━────   8.0 GB" in screen_text(app)

    drive(app, script, size=(100, 24))


def test_the_details_of_a_model_name_what_it_needs_and_the_other_models_of_its_family():
    known = {each.name: each for each in offers.of_catalogue()}
    rows = [PickerRow(name, known[name].format, FITS, why="first; second", ctx=8192, tok_s=45.2, tok_s_full=23.4,
                      offer=known[name], needs=6_000_000_000, share=0.25)
            for name in ("qwen3-8b", "qwen3-8b@bf16", "qwen3-14b", "phi-4")]  # fmt: skip
    lines = card(rows[0], "predicted", rows, 42).plain.split("\n")
    assert lines[0] == "qwen3-8b"
    assert lines[1].startswith("fits · nf4, 2025")
    assert any("6.0 GB, 25%" in line and "━" in line for line in lines)
    assert "context   8,192 tokens at most" in lines
    assert "speed     45 tok/s, 23 when the context is full" in lines
    assert lines.index("· First") < lines.index("· Second") < lines.index("· Speeds are predicted")
    assert "Also in this family: 1" in lines
    assert lines[-1].startswith("qwen3-14b")


def test_the_score_and_the_year_stand_below_the_list_too():
    offer = next(each for each in offers.of_catalogue() if each.name == "qwen3-8b")
    row = PickerRow(offer.name, offer.format, tok_s=45.2, tok_s_full=23.4, offer=offer)
    assert "about 45 tok/s, 23 when the context is full; score ~1299 (2025)" in row.sentence
