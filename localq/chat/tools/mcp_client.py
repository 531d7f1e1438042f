"""Connections to MCP servers, in a thread with an event loop of its own; the chat's threads wait for futures.

`mcp` is imported in that thread. A connection is opened, used and closed by one task, as its cancel scopes want it. It
offers the server nothing of the chat: no sampling, no questions (elicitation), no folders (roots).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import shutil
import threading
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from localq import __version__, disk, places, processes
from localq.chat.tools import results
from localq.chat.tools.results import ToolResult
from localq.chat.tools.servers import OPTION, ToolServer
from localq.errors import LocalqError
from localq.sanitize import sanitize

if TYPE_CHECKING:  # start-up cost, and an optional package
    from mcp import Client

T = TypeVar("T")
CONNECT_S = 30.0  # to start, agree on a version and list the tools; `npx` may fetch a package first
CLOSE_S = 8.0
MOST_PAGES = 50  # of a list of tools
MOST_TOOLS = 128  # of a server
_TAIL_BYTES = 4096  # of a log, searched for the last message


@dataclass(frozen=True)
class ServerTool:
    """A tool as its server describes it; texts are sanitized. schema: JSON schema of the arguments."""

    name: str
    description: str
    schema: dict[str, Any]


class EventLoop:
    """A daemon thread with an event loop, started with the first coroutine."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run `work` there; cancelling the future cancels it."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End the thread; what still runs is cancelled."""
        if self._loop is None or self._thread is None:
            return
        with contextlib.suppress(Exception):
            self.submit(_cancel_all()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()
        self._loop = self._thread = None


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class ServerConnection:
    """The connection to one server. All methods but `open` may be called from any thread, and none blocks."""

    def __init__(self, server: ToolServer, loop: EventLoop) -> None:
        self.server, self._loop = server, loop
        self._client: Client | None = None
        self._exit_code: int | None = None
        self._closing: asyncio.Event | None = None
        self._task: concurrent.futures.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """True while tools can be called."""
        return self._client is not None and self._exit_code is None

    def open(self) -> concurrent.futures.Future[list[ServerTool]]:
        """Begin to connect; the future has the tools, or the LocalqError that says why there are none."""
        ready: concurrent.futures.Future[list[ServerTool]] = concurrent.futures.Future()
        self._exit_code = None
        self._task = self._loop.submit(self._serve(ready))
        return ready

    def call(self, tool: str, arguments: dict[str, Any], seconds: float) -> concurrent.futures.Future[ToolResult]:
        """Call a tool; the future has its result, which may be an error. Cancelling it ends the call."""
        return self._loop.submit(self._call(tool, arguments, seconds))

    def close(self) -> concurrent.futures.Future[None]:
        """Begin to end the connection and the server's process."""
        return self._loop.submit(self._close())

    # ---- in the thread of the loop

    async def _serve(self, ready: concurrent.futures.Future[list[ServerTool]]) -> None:
        """Open the connection and hold it until it is to be closed."""
        self._closing, opened = asyncio.Event(), asyncio.Event()
        holding = asyncio.create_task(self._hold(ready, opened))
        waiting = [asyncio.create_task(each.wait()) for each in (opened, self._closing)]
        try:
            await asyncio.wait([holding, *waiting], timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
            if not opened.is_set() and not holding.done():
                holding.cancel()
                why = "stopped" if self._closing.is_set() else f"not ready within {CONNECT_S:g} s"
                _fail(ready, self._error(why))
            await holding
        except (Exception, asyncio.CancelledError) as error:
            _fail(ready, self._error(self._reason(error)))
        finally:
            self._client = None
            for task in waiting:
                task.cancel()

    async def _hold(self, ready: concurrent.futures.Future[list[ServerTool]], opened: asyncio.Event) -> None:
        """Connect, list the tools, and keep the connection until it is to be closed."""
        if self.server.command and shutil.which(self.server.command[0]) is None:
            raise LocalqError("", f"no such program: {self.server.command[0]}")
        try:
            from mcp import Client, Implementation  # an optional package, and 0.5 s
        except ImportError as error:
            raise LocalqError("", f"requires the `mcp` package, version 2.3 or newer ({error})") from error
        about = Implementation(name="localq", version=__version__)
        async with Client(self._streams(), client_info=about, cache=None) as client:
            tools = await _list_tools(client)
            self._client = client
            opened.set()
            ready.set_result(tools)
            assert self._closing is not None
            await self._closing.wait()

    def _streams(self) -> AbstractAsyncContextManager[Any]:
        from localq.chat.tools import transports

        if not self.server.command:
            return transports.address_streams(self.server)
        return transports.process_streams(self.server, log_file(self.server.name), self._ended)

    def _ended(self, code: int) -> None:
        self._exit_code = code

    async def _call(self, tool: str, arguments: dict[str, Any], seconds: float) -> ToolResult:
        client = self._client
        if client is None or self._exit_code is not None:
            return results.error(f"the server {self.server.name} is not running{self._exit_words()}")
        try:
            async with asyncio.timeout(seconds):
                found = await client.call_tool(tool, arguments)
        except TimeoutError:
            return results.error(f"no result within {seconds:g} s (mcp_timeout)")
        except Exception as error:
            await asyncio.sleep(0)  # the reader of the process may know its exit code by now
            return results.error(self._reason(error))
        return results.of_content(found.content, found.structured_content, found.is_error)

    async def _close(self) -> None:
        if self._closing is not None:
            self._closing.set()
        if self._task is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.wrap_future(self._task), CLOSE_S)

    # ---- errors

    def _error(self, why: str) -> LocalqError:
        step = f"Continuing without its tools. To try again, run `/tools restart {self.server.name}`."
        return LocalqError(f"{OPTION} {self.server.name}", why, step)

    def _reason(self, error: BaseException) -> str:
        """Return the reason a connection or a call failed, in words."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, LocalqError):
            return error.why
        if self._exit_code is not None:
            return f"the server exited{self._exit_words()}"
        said = " ".join(sanitize(str(getattr(error, "message", "") or error)).split())[:300]
        return said or type(error).__name__

    def _exit_words(self) -> str:
        if self._exit_code is None:
            return ""
        said = _last_words(log_file(self.server.name))
        return f" ({processes.exit_reason(self._exit_code)}{f': {said}' if said else ''})"


def log_file(name: str) -> Path:
    """The file with the stderr of the server `name`. Raises LocalqError (exit 2) without a home folder."""
    return places.state_dir() / "mcp" / f"{name}.log"


def make_log_folder() -> None:
    """Make the folder of the logs. Raises LocalqError where the disk refuses."""
    disk.make_folder(places.state_dir() / "mcp")


def quiet_library() -> None:
    """Keep messages of the libraries behind the connections off the terminal: errors are reported by results."""
    for name in ("mcp", "httpx2", "httpcore2", "anyio"):
        logger = logging.getLogger(name)
        logger.addHandler(logging.NullHandler())
        logger.propagate = False


async def _list_tools(client: Client) -> list[ServerTool]:
    found: list[ServerTool] = []
    cursor: str | None = None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [ServerTool(each.name, sanitize(each.description or ""), each.input_schema) for each in page.tools]
        cursor = page.next_cursor
        if cursor is None or len(found) >= MOST_TOOLS:
            break
    return found[:MOST_TOOLS]


def _fail(ready: concurrent.futures.Future[Any], error: LocalqError) -> None:
    if not ready.done():
        ready.set_exception(error)


def _last_words(log: Path) -> str:
    """The last message of a log; empty without one."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = sanitize(file.read(_TAIL_BYTES).decode("utf-8", "replace")).split("\n")
        return processes.last_message(lines)[:200]
    return ""
