"""What only holds others looks as Textual draws it, and costs one row."""

from __future__ import annotations

from textual._styles_cache import StylesCache
from textual.geometry import Region
from textual.widget import Widget

from localq.tui.chat.transcript_view import TranscriptView
from localq.tui.chat.turn_view import TurnView
from localq.tui.reply.repeated_row import RepeatedRow
from localq.tui.reply.reply_text import CodeBlock, ReplyText
from tests.support.tui.tui_pilot import chat_app, drive_chat, say, screen_text, until

REPLY = "Some *text*\n\n```python\n" + "x = [1]\n" * 40 + "```\n\nlast"


def test_rows_are_those_of_textual():
    app, seen = chat_app([REPLY]), []

    async def script(pilot):
        await say(pilot, "go")
        await until(pilot, lambda: "last" in screen_text(app))
        widgets = [each for each in app.chat.query("*") if isinstance(each, RepeatedRow)]
        assert set(map(type, widgets)) == {TranscriptView, TurnView, ReplyText, CodeBlock}
        for widget in widgets:
            for border in ("none", "round"):
                widget.styles.border = (border, "red")
                await pilot.pause()
                width, height = widget.region.size
                for crop in (Region(0, 0, width, height), Region(3, 1, width - 4, height - 1), Region(0, 0, width, 1)):
                    widget._styles_cache.clear()
                    wanted = Widget.render_lines(widget, crop)
                    widget._styles_cache.clear()
                    assert widget.render_lines(crop) == wanted
                    seen.append(len(wanted))

    drive_chat(app, script)
    assert max(seen) > 15


def test_one_row_is_drawn_for_all_of_them(monkeypatch):
    app, rows, line = chat_app([REPLY]), [], StylesCache.render_line

    def counted(self, *rest):
        rows.append(self)
        return line(self, *rest)

    async def script(pilot):
        await say(pilot, "go")
        await until(pilot, lambda: "last" in screen_text(app))
        monkeypatch.setattr(StylesCache, "render_line", counted)
        widget = app.chat.query_one(CodeBlock)
        for crop in (Region(0, 5, 40, 30), Region(0, 8, 40, 20)):
            rows.clear()
            widget._styles_cache.clear()
            assert len(widget.render_lines(crop)) == crop.height
            assert len(rows) == 1

    drive_chat(app, script)
