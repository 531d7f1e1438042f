"""Replies drawn by few widgets: they look as Textual's own Markdown does, cell by cell, and act as it does."""

from __future__ import annotations

import pytest
from textual.containers import VerticalScroll
from textual.selection import SELECT_ALL
from textual.widgets import Markdown

from localq.text.markdown.parser import markdown_parser
from localq.tui.reply.prose import Prose
from localq.tui.reply.reply_text import CodeBlock, ReplyText
from tests.support.tui.drawn_cells import cells
from tests.support.tui.tui_pilot import HostApp, chat_app, drive, drive_chat, say, screen_text, until

EVERYTHING = """# A title that is *long* enough for two lines of it where there are few columns

Some **bold** and ~~no~~ `code`, a [link](http://example.org/1) and enough text that it is broken.

## Second `x`
### Third
#### Fourth
##### Fifth
###### Sixth

text\\
broken hard ![of](a.png)

- item one
- item two with `code` and more words that go on until the line is full and then some more
  - nested
    - deeper
  1. number

     second paragraph
- item three

  loose

---

| name | value | note |
|---|---:|---|
| 日本語 | 1 | something **bold** |
| b |  | something longer that must be broken because it is too wide for any screen that is seen here |

9. first
10. second
    > quoted in a list

> quoted `code`
> - list in it
>
> # heading
> two
>
>> more

```py
x = [1]  # not broken, however long it is, and however few columns there are
```

- a list

  ```
  with code in it
  ```

| only |
|---|

***
last
"""


class Stock(Markdown):
    """Textual's, with our blocks of code."""

    BLOCKS = ReplyText.BLOCKS


def drawn(widget: Markdown, width: int, theme: str) -> list[list[tuple[object, ...]]]:
    app, found = HostApp(VerticalScroll(widget)), []

    async def script(pilot):
        app.theme = theme
        await until(pilot, lambda: "last" in screen_text(app))
        await pilot.pause()
        found.extend(cells(app))

    drive(app, script, (width, 150))
    return found


@pytest.mark.parametrize(("width", "theme"), [(80, "textual-light"), (29, "nord")])
def test_it_looks_as_textual_draws_it(width, theme):
    wanted = drawn(Stock(EVERYTHING, parser_factory=markdown_parser), width, theme)
    assert drawn(ReplyText(EVERYTHING), width, theme) == wanted


def test_what_comes_in_pieces_looks_as_the_whole():
    reply = ReplyText()
    app, found = HostApp(VerticalScroll(reply)), []

    async def script(pilot):
        await pilot.pause()
        for start in range(0, len(EVERYTHING), 7):
            await reply.append(EVERYTHING[start : start + 7])
        await pilot.pause()
        found.extend(cells(app))

    drive(app, script, (61, 150))
    assert found == drawn(ReplyText(EVERYTHING), 61, "textual-dark")


def test_long_replies_are_few_widgets():
    """Every widget costs time whenever anything is laid out: Textual's Markdown has 40 of them for each part here."""
    part = (
        "## T\n\nsome *text*\n\n- a\n- b\n  - c\n\n| x | y |\n|---|---|\n| 1 | 2 |\n\n```py\nx\n```\n\n> q\n\n1. n\n\n"
    )
    reply = ReplyText(part * 20)
    app = HostApp(VerticalScroll(reply))

    async def script(pilot):
        await until(pilot, lambda: len(reply.query(CodeBlock)) == 20)
        assert len(reply.query("*")) == 20 * (1 + 3) + 1  # a text and a block of code with its parts, each time

    drive(app, script)


SOME = "one two three four\n\n- five *six*\n- seven\n\n| a | b |\n|-|-|\n| c | d |"


def selected(widget: Markdown, begin: tuple[int, int], end: tuple[int, int]) -> tuple[str, set[tuple[int, int]]]:
    """What is selected by the mouse from one cell to another, and which cells show it."""
    app, found = HostApp(VerticalScroll(widget)), []

    async def script(pilot):
        await until(pilot, lambda: "d" in screen_text(app))
        await pilot.pause()
        before = cells(app)
        await pilot.mouse_down(offset=begin)
        await pilot.hover(offset=end)
        await pilot.mouse_up(offset=end)
        await pilot.pause()
        rows = zip(before, cells(app), strict=True)
        marked = {
            (x, y) for y, row in enumerate(rows) for x, (was, now) in enumerate(zip(*row, strict=True)) if was != now
        }
        found.extend([app.screen.get_selected_text(), marked])

    drive(app, script, (20, 24))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("begin", "end", "text"),
    [
        ((6, 0), (4, 1), "two three fou"),
        ((4, 3), (14, 4), "five six\n•  seven"),
        ((2, 0), (14, 4), "one two three four\n•  five six\n•  seven"),
    ],
)
def test_what_is_selected_is_the_text_as_it_was_before_it_was_broken(begin, end, text):
    wanted = selected(Stock(SOME, parser_factory=markdown_parser), begin, end)
    assert wanted[0] == text
    assert selected(ReplyText(SOME), begin, end) == wanted


def test_all_of_it_is_selected_cell_by_cell():
    reply = ReplyText(SOME)

    async def script(pilot):
        await until(pilot, lambda: reply.query(Prose))
        text = "one two three four\n•  five six\n•  seven\na\nb\nc\nd"
        assert reply.query_one(Prose).get_selection(SELECT_ALL) == (text, "\n")

    drive(HostApp(reply), script, (20, 24))


def test_a_link_in_a_reply_is_told(monkeypatch):
    app = chat_app(["See [this](http://example.org/a%20b) and\n\n| [that](http://example.org/c) |\n|---|\n"])

    async def script(pilot):
        await say(pilot, "links")
        prose = app.chat.query_one(Prose)
        await pilot.click(prose, offset=(5, 0))
        await until(pilot, lambda: "link: http://example.org/a b" in screen_text(app))
        await pilot.click(prose, offset=(3, 3))
        await until(pilot, lambda: "link: http://example.org/c" in screen_text(app))

    drive_chat(app, script)
