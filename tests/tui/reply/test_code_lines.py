"""Blocks of code: they look as Textual draws them, and of one that grows only what is new is coloured and drawn."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from textual.containers import VerticalScroll
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.widgets import Markdown

from localq.tui.reply import code_colours
from localq.tui.reply.code_colours import PART, GrowingCode, Look
from localq.tui.reply.code_lines import CodeLines
from localq.tui.reply.reply_text import CodeBlock, ReplyText
from tests.support.tui.drawn_cells import cells
from tests.support.tui.tui_pilot import HostApp, chat_app, drive, drive_chat, screen_text, until
from tests.tools.typing_latency import FUNCTION

PYTHON = '''def f(x: int) -> str:
    """Says

    x = [1]
    """
    return f"{x!r}" + 'é'  # 語


class A(B):
    c = 1.5e3
'''
HTML = "<p class='a'>&amp;</p>\n<script>\nlet a = `x ${1 +\n 2} y`;\n// end\n</script>\n" * 9 + "<b>last</b>"
C = "/* a\n b */\nint main(void) { return 'x'; }\n"
CODE = {"python": PYTHON * 9 + "last = 1", "html": HTML, "c": C, "": "some\n"}
LONG = [line for number in range(100) for line in FUNCTION.format(number).splitlines()][:-2]


def never() -> bool:
    return False


def styles(content):
    """Of each character, its styles in their order."""
    return [
        (letter, [span.style for span in content.spans if span.start <= place < span.end])
        for place, letter in enumerate(content.plain)
    ]


@pytest.mark.parametrize("language", CODE)
@pytest.mark.parametrize(
    ("ansi", "dark", "theme"),
    [(False, True, HighlightTheme), (True, True, ANSIDarkHighlightTheme), (True, False, ANSILightHighlightTheme)],
)
def test_colours_are_those_of_textual(language, ansi, dark, theme):
    wanted = highlight(CODE[language].rstrip(), language=language or "text", theme=theme).split("\n", allow_blank=True)
    found = code_colours.lines(CODE[language].rstrip(), Look(language, ansi, dark))
    assert [styles(line.content) for line in found] == [styles(each) for each in wanted]


@pytest.mark.parametrize("language", ["no such language", "", "text"])
def test_no_language_is_guessed(monkeypatch, language):
    monkeypatch.setattr("textual.highlight.guess_language", None)
    assert [line.content.plain for line in code_colours.lines("#!/bin/sh\n\nx", Look(language, False, True))] == [
        "#!/bin/sh", "", "x"
    ]  # fmt: skip


@pytest.mark.parametrize("language", CODE)
@pytest.mark.parametrize("step", [3, 83])
def test_a_block_that_grows_has_the_lines_of_the_whole(language, step):
    growing, code, found = GrowingCode(Look(language, False, True)), CODE[language], []

    async def grow() -> None:
        for end in range(0, len(code), step):
            found.append((await growing.take(code[:end].rstrip(), never), code[:end].rstrip()))

    asyncio.run(grow())
    for lines, so_far in found:
        assert [line.content.plain for line in lines] == (so_far.splitlines() or [""])


def test_what_is_finished_is_coloured_once_and_python_as_in_the_whole():
    growing, coloured, code = GrowingCode(Look("python", False, True)), [], "\n".join(LONG)

    async def grow() -> list[code_colours.ColouredLine]:
        found = []
        for end in range(0, len(LONG) + 5, 5):
            before = set(map(id, found))
            found = await growing.take("\n".join(LONG[:end]).rstrip(), never)
            coloured.append(len([line for line in found if id(line) not in before]))
        return found

    found = asyncio.run(grow())
    assert max(coloured) <= 2 * PART
    whole = code_colours.lines(code, growing.look)
    assert [styles(line.content) for line in found] == [styles(line.content) for line in whole]


def test_code_that_becomes_other_code_is_coloured_anew():
    growing = GrowingCode(Look("python", False, True))

    async def take(lines: list[str]) -> list[str]:
        return [line.content.plain for line in await growing.take("\n".join(lines), never)]

    assert asyncio.run(take(LONG)) == LONG
    other = ["x = 1", *LONG[:-1]]
    assert asyncio.run(take(other)) == other


def test_keys_go_first():
    """Between slices of time others have their turns, and while a key waits nothing is coloured."""
    turns, waits = itertools.count(), iter([True, True, True, *[False] * 10**6])

    async def others() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    async def colour() -> None:
        task = asyncio.create_task(others())
        await code_colours.prepare("\n".join(LONG) + "\nkeys = 1", Look("python", False, True), lambda: next(waits))
        task.cancel()

    asyncio.run(colour())
    assert next(turns) > 3
    assert next(waits) is False


def drawn(widget: Markdown, width: int) -> list[list[tuple[object, ...]]]:
    app, found = HostApp(VerticalScroll(widget)), []

    async def script(pilot):
        await until(pilot, lambda: "last" in screen_text(app))
        await pilot.pause()
        found.extend(cells(app))

    drive(app, script, (width, 120))
    return found


@pytest.mark.parametrize("language", ["python", "html"])
@pytest.mark.parametrize("width", [90, 23])
def test_a_block_looks_as_textual_draws_it_below_the_line_to_copy_it_by(language, width):
    fence = f"```{language}\n{CODE[language]}\n```\n"
    wanted, found = drawn(Markdown(fence), width), drawn(ReplyText(fence), width)
    first = next(y for y, row in enumerate(found) if "copy" in "".join(cell[0] for cell in row))
    blank = [cell[:2] for cell in wanted[-1]]
    assert [row for row in found[first + 1 :] if [cell[:2] for cell in row] != blank] == [
        row for row in wanted if [cell[:2] for cell in row] != blank
    ]


def test_one_that_came_in_pieces_looks_as_the_whole_once_it_has_ended():
    text, reply = f"```html\n{HTML}\n```\n", ReplyText()
    app, found = HostApp(VerticalScroll(reply)), []

    async def script(pilot):
        await pilot.pause()
        for start in range(0, len(text), 50):
            await reply.append(text[start : start + 50])
        await reply.settle(text)
        await until(pilot, lambda: "last" in screen_text(app))
        await pilot.pause()
        found.extend(cells(app))

    drive(app, script, (71, 120))
    assert found == drawn(ReplyText(text), 71)


def test_only_lines_that_are_seen_and_new_are_drawn(monkeypatch):
    app, lines, strip = chat_app(["ok"]), [], CodeLines._strip

    def counted(self, y, *rest):
        lines.append(y)
        return strip(self, y, *rest)

    monkeypatch.setattr(CodeLines, "_strip", counted)

    async def script(pilot):
        transcript = app.chat.conversation.transcript
        view = await transcript.begin(reading=False)
        transcript.anchor()
        await view.grow("", "```python\n" + "\n".join(LONG) + "\n")
        await until(pilot, lambda: LONG[-3].strip()[:30] in screen_text(app), "the end of it")
        assert len(set(lines)) < 60, "of 600, on 24 rows"
        await pilot.pause()
        lines.clear()
        await view.grow("", "one_more = 1\n")
        await until(pilot, lambda: "one_more" in screen_text(app), "the new line")
        assert 0 < len(set(lines)) <= 2
        assert app.chat.query_one(CodeBlock).code_source.endswith("one_more = 1")

    drive_chat(app, script)


def selected(widget: Markdown, first: int, last: int) -> str | None:
    """What is selected by the mouse from a place in row `first` to one in row `last`."""
    app, found = HostApp(widget), []

    async def script(pilot):
        await until(pilot, lambda: "delta" in screen_text(app))
        await pilot.pause()
        await pilot.mouse_down(offset=(6, first))
        await pilot.hover(offset=(8, last))
        await pilot.mouse_up(offset=(8, last))
        await pilot.pause()
        found.append(app.screen.get_selected_text())

    drive(app, script, (30, 20))
    return found[0]


def test_what_is_selected_is_the_code():
    fence = "```\nalpha = 1\n\n  beta\ngamma delta\n```\n"
    assert selected(ReplyText(fence), 3, 6) == selected(Markdown(fence), 2, 5) == "pha = 1\n\n  beta\ngamma"
