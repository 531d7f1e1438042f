"""Replies as Markdown at a terminal: what is seen, that it is the same however a reply comes, that nothing is lost."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys

import pytest

from localq.cli.markdown import rows as markdown_rows
from localq.cli.markdown.stream import MarkdownStream
from localq.cli.markdown.terminal_rows import TerminalWatch
from tests.support.cli.hostile_sequences import Watch as Acting
from tests.support.cli.hostile_sequences import random_text
from tests.support.cli.markdown_pages import DOCUMENT, Page, cut, printed, thrown
from tests.support.cli.terminal_stream import tokens
from tests.support.text.tiny_tokenizers import SENTENCES

SEEN = """\
Ships of the line

They have masts, sails, oars and
<b>anchors</b>; see the list
(https://example.org/a?b=1&c=2). The
second line, https://example.org/auto
and a ship (ship.png).

def sail(to):
    \"\"\"Many
    lines.\"\"\"
        return f"{to}"  # 行き先

sail("port")

Behind it.

• one
• two, with more words than there is
  room for on a row of a terminal that
  is not wide at all and goes on
  • within
    1. deep
    2. deeper

  A second part of two.

ls -la
  # indented

• three

7. a
8. b

▌ Said by somebody
▌  • a point

name    masts             of
──────────────────────────────────────
sloop       1             x
船         12    a long cell that is
                   broken into rows

──────────────────────────────────────
Under

four blanks
more

The end"""
MULTILINGUAL = "\n\n".join(f"{number}. **{each}** {each}\n{each}" for number, each in enumerate(SENTENCES, 1))


def escapes(page: Page) -> set[str]:
    return set(re.findall("\x1b\\[[0-9;]*[A-Za-z]", page.getvalue()))


def test_what_is_seen():
    assert printed(DOCUMENT, (38, 30)).text == SEEN


@pytest.mark.parametrize("text", [DOCUMENT, MULTILINGUAL], ids=["Markdown", "languages"])
def test_a_reply_that_streams_looks_as_one_that_is_there_at_once(text):
    """To every cell, with its colour: at all widths, and on screens on which blocks have no room."""
    rng = random.Random(3)
    for columns, rows in ((20, 5), (rng.randint(21, 60), 24), (rng.randint(61, 119), 11), (120, 50)):
        size = columns, rows
        assert printed(text, size, cut(text, rng)).cells() == printed(text, size).cells(), size


def test_any_text_is_seen_once_and_what_stands_above_stays():
    rng = random.Random(8)
    above = "".join(f"above {number}\n" for number in range(45))
    for _ in range(50):
        (text, words), size = thrown(rng), (rng.randint(20, 120), rng.choice((4, 9, 24, 40)))
        page = Page(*size)
        page.write(above)
        stream = MarkdownStream(page, TerminalWatch(page), colour=True)
        for piece in cut(text, rng):
            stream.write(piece)
        stream.end()
        seen = page.text
        assert seen.startswith(above.strip()), (text, size)
        assert seen.removeprefix(above).rstrip() == printed(text, size).text, (text, size)
        flat = re.sub(r"[\s▌]", "", seen)
        for word in words:
            assert flat.count(word) <= 1, (word, text, size)
            assert word in flat or re.search(f"^[^\n]*(```|~~~)[^\n]*{word}", text, re.MULTILINE), (word, text, size)


def test_an_unfinished_block_is_seen_as_it_was_written_and_code_line_by_line():
    page = Page(40, 24)
    stream = MarkdownStream(page, TerminalWatch(page), colour=True)
    for piece, seen in (
        ("a **bo", "a **bo"),
        ("ld** word\nand", "a **bold** word\nand"),
        (" more\n\n", "a bold word and more"),
        ("```py\nif x", "a bold word and more\n\nif x"),
        (":\n", "a bold word and more\n\nif x:"),
        ("  y", "a bold word and more\n\nif x:\n  y"),
        ("\n``", "a bold word and more\n\nif x:\n  y"),
        ("`\n", "a bold word and more\n\nif x:\n  y"),
        ("- *c*", "a bold word and more\n\nif x:\n  y\n\n- *c*"),
    ):
        stream.write(piece)
        assert page.text == seen
    stream.end()
    assert page.text == "a bold word and more\n\nif x:\n  y\n\n• c"


@pytest.mark.parametrize("disturbed", ["narrower", "wider", "resized and back", "stopped", "Enter", "Enter, unseen"])
def test_a_block_during_which_something_happens_stays_as_it_was_written(disturbed):
    """How far up its rows begin is not known then. The next block is drawn again."""
    page = Page(40, 24)
    watch = TerminalWatch(page)
    page.write("above\n")
    page.echoes(disturbed == "Enter")
    with watch.listen():
        stream = MarkdownStream(page, watch, colour=True)
        stream.write("**one**\n\n**two** and")
        if disturbed in ("narrower", "wider"):
            page.resize(30 if disturbed == "narrower" else 50, 24)
        elif disturbed.startswith("Enter"):
            os.write(page.keyboard, b"\n")
            assert select.select([page], [], [], 30)[0]
        else:
            signal.raise_signal(signal.SIGWINCH if "resized" in disturbed else signal.SIGCONT)
        stream.write(" more\n\n**three**\n\n```\ncode\n```\n")
        stream.end()
    kept = "two and more" if disturbed == "Enter, unseen" else "**two** and more"
    assert page.text == f"above\none\n\n{kept}\n\nthree\n\ncode"


def test_a_block_that_has_left_the_screen_stays_as_it_was_written_and_code_has_its_colours():
    text = "**long** " + "word " * 60
    code = "\n".join(f"x = {number}" for number in range(40))
    page = printed(f"a\n\n{text}\n\n**b**\n\n```py\n{code}\n```", (40, 7))
    assert page.text.startswith("a\n\n**long** word")
    assert page.text.replace("\n", "").count("word") == 60
    assert page.text.endswith(f"\n\nb\n\n{code}")
    coloured = [row for row in page.cells() if row[0][0] == "x" and row[4][1] != "default"]
    assert len(coloured) == 40


def test_the_work_grows_with_the_text_alone(monkeypatch):
    drawn = []
    for name in ("rows", "code"):
        original = getattr(markdown_rows.Renderer, name)

        def counted(self, what, *more, original=original):
            drawn.append(len(what.source) if hasattr(what, "source") else len("\n".join([*what, *more[1]])))
            return original(self, what, *more)

        monkeypatch.setattr(markdown_rows.Renderer, name, counted)
    for text in ("- an item of a list\n" * 800, "word " * 4000, "```py\n" + "a = b  # c\n" * 1500, DOCUMENT * 12):
        drawn.clear()
        page = printed(text, (80, 24), list(text))
        assert sum(drawn) <= 2.2 * len(text)
        assert len(page.getvalue()) <= 6 * len(text)


def test_code_is_copied_as_it_was_written():
    """No frame, no blanks at its ends, no ends of lines that are not its own; tabs stay."""
    lines = ["def f():", "\treturn 1", "", "  # " + "long " * 40 + "end", "x = '行' * 2"]
    for language in ("py", "", "nolanguage"):
        page = printed("\n".join([f"```{language}", *lines, "```"]), (50, 24))
        for written in (re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", part) for part in page.getvalue().split("\x1b[J")):
            assert written.strip("\n\r").split("\n") == lines
        assert "\x1b[3" in page.getvalue()  # colours


def test_an_address_is_copied_as_it_was_written():
    address = "https://example.org/" + "path/" * 20
    text = printed(f"- see {address} and [this]({address})\n> {address}", (40, 24)).getvalue()
    assert f"  {address}\n" in text
    assert f"({address})" in text
    assert f"{address}\x1b[0m\n" in text or f"{address}\n" in text


def test_without_colour_there_is_structure():
    page = printed(DOCUMENT, (38, 30), colour=False)
    assert page.text == SEEN
    assert escapes(page) >= {"\x1b[1m", "\x1b[0m"}
    assert not any(re.fullmatch("\x1b\\[(?:.*;)?(?:[349][0-7]|[34]8.*)m", each) for each in escapes(page))


def test_cells_that_have_no_column_and_tables_that_have_no_room_stay_as_they_were_written():
    text = "| a | b |\n|---|---|\n| c | d | extra |"
    assert printed(text, (40, 24)).text == text
    wide = "|".join(["", *(f" word{number} " for number in range(30)), ""])
    rules = "|".join(["", *["-"] * 30, ""])
    assert re.findall(r"word\d+", re.sub(r"\s", "", printed(f"{wide}\n{rules}", (20, 24)).text)) == [
        f"word{number}" for number in range(30)
    ]


def test_what_acts_on_a_terminal_does_not_reach_it_neither_by_entities():
    rng, watch = random.Random(2), Acting()
    entities = (
        "&#27;[2J &#x9b;7777m &#x202e;ZQ &#13;ZQ &#12; &#8; &#7; &#x2028; [ZQ](&#27;]0;x&#7;) <https://ZQ&#13;.x>"
    )
    for text in (
        entities,
        f"`{entities}`",
        f"| {entities} |\n|---|\n| {entities} |",
        f"```{entities}\n{entities}\n```",
    ):
        for token in tokens(printed(text, (60, 24)).getvalue()):
            watch(token)
    for _ in range(300):
        text = "\n".join(random_text(rng) for _ in range(rng.randint(1, 6)))
        for token in tokens(printed(text, (60, 24), cut(text, rng)).getvalue()):
            watch(token)
    assert watch.wrong == []
    assert watch.seen > 1000


def test_rich_is_not_loaded_before_something_is_drawn():
    script = """
import io, os, sys
from localq.cli.markdown.stream import MarkdownStream
class TerminalWatch:
    size = os.terminal_size((80, 24))
    begin = is_unchanged = lambda self: True
stream = MarkdownStream(io.StringIO(), TerminalWatch(), True)
stream.write("a word")
print("rich" in sys.modules, "markdown_it" in sys.modules)
stream.write("\\n\\n")
print("rich.markdown" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False False\nTrue\n"
