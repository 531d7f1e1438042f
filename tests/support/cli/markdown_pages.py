"""A terminal of a known size without a process: what is written to it is kept, and shown as pyte shows it.

The size and the echo are those of a real pty, so that whoever asks the kernel is told; nothing is written there.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import random
import struct
import termios
from collections.abc import Iterable, Iterator

import pyte

from localq.cli.markdown.stream import MarkdownStream
from localq.cli.markdown.terminal_rows import TerminalWatch
from tests.support.text.tiny_tokenizers import SENTENCES

DOCUMENT = '''# Ships of the `line`

They have **masts**, *sails*, ~~oars~~ and <b>anchors</b>; see [the list](https://example.org/a?b=1&c=2).
The second line, <https://example.org/auto> and ![a ship](ship.png).
```python
def sail(to):
    """Many
    lines."""
\treturn f"{to}"  # 行き先

sail("port")
```
Behind it.

- one
- two, with more words than there is room for on a row of a terminal that is not wide at all
  and goes on
  - within
    1. deep
    1. deeper

  A second part of two.

  ```bash
  ls -la
    # indented
  ```
- three

7. a
1. b

> Said by **somebody**
> - a point

| name | masts | of |
|---|--:|:-:|
| sloop | 1 | `x` |
| 船 | 12 | a long cell that is broken into rows |

***
Under
=====

    four blanks
    more

The end'''
# Pieces that documents are thrown together from; @ becomes a word of its own.
PIECES = (
    "- ", "* ", "1. ", "2) ", "> ", "```\n", "```py\n", "~~~\n", "\n", "\n", "\n\n", "  ", "    ", "\t", "# ", "---\n",
    "===\n", "|", " | ", "| @ | @ |\n|---|---|\n| @ | @ |\n", "**", "*", "_", "`", "[@](b)", "![@](y)", "<b>", "\\",
    "@ ", "@ ", "@ @ ", "@語@ ", "&#27;[31m", "&#x202e;", "&#13;", "&amp;", "https://example.org/@ ",
    "e\u0301", "👩‍👩‍👧 ",
    *SENTENCES,
)  # fmt: skip


class _Screen(pyte.HistoryScreen):
    """pyte drops what stands behind a character of no width that is no combining one."""

    def draw(self, data: str) -> None:
        if data.isascii():
            super().draw(data)
        else:
            for letter in data:
                super().draw(letter)


class Page(io.StringIO):
    """A stdout at a terminal of so many columns and rows."""

    def __init__(self, columns: int, rows: int) -> None:
        super().__init__()
        self.keyboard, self._terminal = pty.openpty()
        self.resize(columns, rows)
        self.echoes(False)

    def fileno(self) -> int:
        return self._terminal

    def isatty(self) -> bool:
        return True

    def resize(self, columns: int, rows: int) -> None:
        """As the kernel tells it; what is there already stays as it was."""
        self.size = columns, rows
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def echoes(self, on: bool) -> None:
        """What is typed is shown, as outside of a chat."""
        modes = termios.tcgetattr(self._terminal)
        modes[3] = modes[3] | termios.ECHO if on else modes[3] & ~termios.ECHO
        termios.tcsetattr(self._terminal, termios.TCSANOW, modes)

    def close(self) -> None:
        os.close(self.keyboard)
        os.close(self._terminal)
        super().close()

    def cells(self) -> list[list[tuple[str, str, bool]]]:
        """All rows, those that have scrolled away too: characters with their colour and whether they are bold."""
        columns, rows = self.size
        screen = _Screen(columns, rows, history=10_000, ratio=0.5)
        pyte.Stream(screen).feed(self.getvalue().replace("\n", "\r\n"))
        lines = [*screen.history.top, *(screen.buffer[y] for y in range(rows))]
        return [[(row[x].data, row[x].fg, row[x].bold) for x in range(columns)] for row in lines]

    @property
    def text(self) -> str:
        """The same as text, without what is empty at the ends."""
        rows = ("".join(data for data, _, _ in row).rstrip() for row in self.cells())
        return "\n".join(rows).rstrip()


def printed(text: str, size: tuple[int, int], pieces: Iterable[str] | None = None, **how: object) -> Page:
    """A page with a reply on it, which came in `pieces`, or all at once; how: of `MarkdownStream`."""
    page = Page(*size)
    stream = MarkdownStream(page, TerminalWatch(page), **{"colour": True, **how})
    for piece in [text] if pieces is None else pieces:
        stream.write(piece)
    stream.end()
    return page


def cut(text: str, rng: random.Random, longest: int = 7) -> Iterator[str]:
    """`text` in random pieces."""
    place = 0
    while place < len(text):
        length = rng.randint(1, longest)
        yield text[place : place + length]
        place += length


def thrown(rng: random.Random, longest: int = 60) -> tuple[str, list[str]]:
    """A random document, and the words of it that must be seen once each."""
    parts = "".join(rng.choices(PIECES, k=rng.randint(1, longest))).split("@")
    words = [f"q{number}z" for number in range(1, len(parts))]
    return parts[0] + "".join(word + part for word, part in zip(words, parts[1:], strict=True)), words
