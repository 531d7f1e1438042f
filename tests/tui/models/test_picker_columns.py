"""The columns of the list of models: those that there is room for, whole; what is left out stands in words below."""

from __future__ import annotations

from typing import Any

import pytest
from textual.pilot import Pilot

from localq.planner import offers
from localq.tui.models.picker_rows import ON_CPU, PickerRow
from localq.tui.models.picker_table import ModelTable
from tests.support.tui.tui_pilot import HostApp, drive, screen_text
from tests.tools.golden_screens import ROWS


@pytest.mark.parametrize(
    ("columns", "headings"),
    [
        (130, "MODEL SCORE FORMAT VERDICT CONTEXT TOK/S WHEN_FULL WHERE"),
        (90, "MODEL FORMAT VERDICT CONTEXT TOK/S WHEN_FULL WHERE"),
        (80, "MODEL FORMAT VERDICT CONTEXT TOK/S WHERE"),
        (61, "MODEL FORMAT VERDICT CONTEXT TOK/S"),
        (52, "MODEL VERDICT CONTEXT TOK/S"),
        (35, "MODEL VERDICT"),
        (20, "MODEL"),
        (7, "MODEL"),
    ],
)
def test_no_column_is_cut_where_there_is_no_room_for_all(columns, headings):
    app = HostApp(ModelTable())

    async def script(pilot: Pilot[Any]) -> None:
        table = app.query_one(ModelTable)
        table.show(ROWS)
        await pilot.resize_terminal(columns, 24)
        await pilot.pause()
        assert [str(each.label).replace(" ", "_") for each in table.ordered_columns] == headings.split()
        assert table.max_scroll_x == 0
        for line, row in zip(screen_text(app).splitlines()[1:], ROWS, strict=False):
            name = line[1:].split("  ")[0].rstrip()
            assert name == row.name or (name.endswith("…") and row.name.startswith(name[:-1]))
        await pilot.resize_terminal(131, 24)
        await pilot.pause()
        assert len(table.ordered_columns) == 8
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


def test_the_score_and_the_year_stand_below_the_list_too():
    offer = next(each for each in offers.of_catalogue() if each.name == "qwen3-8b")
    row = PickerRow(offer.name, offer.format, tok_s=45.2, tok_s_full=23.4, offer=offer)
    assert "about 45 tok/s, 23 when the context is full; score ~1299 (2025)" in row.sentence
