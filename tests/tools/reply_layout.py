"""What it costs to show long replies and to lay them out at another width: seconds of CPU time.

Of all, and of the longest callback of the loop, during which no key is heard.

    python -m tests.tools.reply_layout --replies 3 --sections 12

No terminal and no engine: drawing is Textual's for tests. One line for each step.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from asyncio import events
from typing import Any

from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.tui.app import LocalqApp
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import until

SECTION = (
    "## Part {0}\n\nSome **bold** words, `code` and as many more as it takes to fill two lines of a terminal of eighty "
    "columns.\n\n- one\n- two, with `code`\n  - within {0}\n- three\n\n```python\ndef part(y):\n    return y + {0}\n"
    "```\n\n| name | value | note |\n|---|---|---|\n| a | {0} | **bold** |\n| b | 2 | longer than that |\n\n"
    "1. first\n2. second\n\n> said by {0}\n\n"
)
SIZES = ((100, 24), (80, 24), (80, 30))
QUIET_S, QUIET_CPU_S = 0.1, 0.005


class Longest:
    """CPU time of the longest callback of any loop since it was last asked."""

    def __init__(self) -> None:
        self._seconds, run = 0.0, events.Handle._run

        def timed(handle: events.Handle) -> None:
            start = time.thread_time()
            run(handle)
            self._seconds = max(self._seconds, time.thread_time() - start)

        events.Handle._run = timed

    def taken(self) -> float:
        """And from now on anew."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


async def settled() -> None:
    """Nothing is done any more: three looks in turn."""
    quiet = 0
    while quiet < 3:
        start = time.process_time()
        await asyncio.sleep(QUIET_S)
        quiet = quiet + 1 if time.process_time() - start < QUIET_CPU_S else 0


async def steps(replies: int, sections: int) -> None:
    """Open it, then each of the sizes."""
    longest, record = Longest(), Record()
    for number in range(replies):
        record.conversation.add(Message("user", f"question {number}"), 2 * number - 1 if number else None)
        text = "".join(SECTION.format(each) for each in range(sections))
        record.conversation.add(Message("assistant", text), 2 * number)
    session = ChatSession(ScriptedClient(["new"]), Load("path", LoadOptions("model")), CharTokenizer())
    app = LocalqApp(Settings(), Start(record), session=session)
    start = time.process_time()

    def tell(what: Any) -> None:
        print(f"{what}: {time.process_time() - start:.2f} s, longest callback {longest.taken():.2f} s", flush=True)

    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.chat.is_mounted and app.chat.conversation.model is not None)
        await settled()
        tell("opened")
        for columns, rows in SIZES:
            start = time.process_time()
            await pilot.resize_terminal(columns, rows)
            await settled()
            tell(f"{columns} x {rows}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, default=3)
    parser.add_argument("--sections", type=int, default=12, help="of each reply")
    given = parser.parse_args()
    asyncio.run(steps(given.replies, given.sections))


if __name__ == "__main__":
    main()
