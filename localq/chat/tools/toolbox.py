"""`Toolbox`: the MCP servers of a chat, their tools, what the user allows, and the call that runs.

It belongs to the chat and outlives a switch of the model or the conversation. Tools are listed once, when a server is
connected: one that changes its tools later does not change what the user has allowed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from localq.chat.tools import mcp_client
from localq.chat.tools.mcp_client import EventLoop, ServerConnection, ServerTool
from localq.chat.tools.permissions import Decision, OfferedTool, Permission, Question
from localq.chat.tools.results import ToolResult
from localq.chat.tools.servers import ToolServer
from localq.errors import LocalqError, usage_error

MOST_DECLARATION = 2**15  # bytes of a tool; a longer one is left out
MOST_DECLARED, MOST_OFFERED = 2**17, 128  # bytes and tools, of all servers; below the limits of `text.tools`
_LOOK_S = 0.1  # how often a wait for servers looks whether it is stopped
_LABEL = 60  # characters of a name as the model knows it; APIs and templates allow 64
ANY = ".*"  # of --mcp-allow: every tool of a server


@dataclass(frozen=True)
class ToolLimits:
    """Limits, as the settings have them: rounds of calls in a reply, seconds of a call, characters of a result."""

    rounds: int = 10
    seconds: float = 60.0
    characters: int = 20_000


class Toolbox:
    """See the module. `asker` shows a question to the user, who answers it later; None: there is nobody to ask."""

    def __init__(
        self, servers: Sequence[ToolServer], limits: ToolLimits | None = None, allowed: Sequence[str] = ()
    ) -> None:
        """allowed: labels of tools, "SERVER.TOOL" or "SERVER.*", that may be called without a question."""
        self.servers, self.limits = tuple(servers), limits or ToolLimits()
        self.asker: Callable[[Question], object] | None = None
        self.tools: tuple[OfferedTool, ...] = ()
        self._allowed = self._unchecked = tuple(allowed)
        self._loop = EventLoop()
        self._guard, self._one_waits = threading.Lock(), threading.RLock()
        self._connections = {each.name: ServerConnection(each, self._loop) for each in servers}
        self._started = False
        self._opening: dict[str, concurrent.futures.Future[list[ServerTool]]] = {}
        self._listed: dict[str, list[ServerTool]] = {}
        self._offered: set[str] = set()  # servers whose tools are in `tools`
        self._permissions: dict[tuple[str, str], Permission] = {}  # by server and name: a label may change
        self._notices: list[str] = []
        self._question: Question | None = None
        self._call: concurrent.futures.Future[ToolResult] | None = None

    # ---- servers

    def start(self) -> None:
        """Begin to connect, in the background; once."""
        if self._started:
            return
        self._started = True
        mcp_client.quiet_library()
        try:
            mcp_client.make_log_folder()
        except LocalqError as error:
            self._notices.append(str(error))
            return
        self._opening = {name: each.open() for name, each in self._connections.items()}

    def wait(self, is_stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until each server has listed its tools, or has failed, which is a notice; or until `is_stopped()`."""
        while not self._one_waits.acquire(timeout=_LOOK_S):  # another thread waits
            if is_stopped():
                return
        try:
            self.start()
            while self._opening and not is_stopped():
                concurrent.futures.wait(self._opening.values(), _LOOK_S)
                for name in [name for name, each in self._opening.items() if each.done()]:
                    self._take(name)
            if self._listed.keys() != self._offered:
                self._offer()
            if not self._opening:
                self._check_allowed()
        finally:
            self._one_waits.release()

    def _take(self, name: str) -> None:
        """Take what a server has listed, or why it has failed."""
        try:
            self._listed[name] = self._opening.pop(name).result()
        except (LocalqError, concurrent.futures.CancelledError) as error:
            self._notices.append(str(error) or f"{name}: stopped")

    def summary(self) -> str:
        """Number of tools by server: "3 from files, 1 from search"."""
        counts = {name: sum(each.server == name for each in self.tools) for name in self._connections}
        return ", ".join(f"{count} from {name}" for name, count in counts.items() if count)

    def take_notices(self) -> list[str]:
        """Notices since the last call."""
        taken, self._notices = self._notices, []
        return taken

    def restart(self, name: str) -> str:
        """Connect to a server again; returns a line. Permissions of its tools are asked for again."""
        if name not in self._connections:
            raise usage_error("/tools restart", f"no such server: {name[:40]!r}", f"Available servers: {self.names()}.")
        with contextlib.suppress(Exception):
            self._connections[name].close().result(mcp_client.CLOSE_S)
        with self._one_waits:
            self._permissions = {key: each for key, each in self._permissions.items() if key[0] != name}
            self._listed.pop(name, None)
            self._offered.discard(name)
            self._opening[name] = self._connections[name].open()
            self.wait()
            self._offer()
        return "\n".join(self.take_notices()) or f"{name}: {len(self._listed[name])} tools"

    def names(self) -> str:
        """The names of the servers."""
        return ", ".join(self._connections)

    def is_running(self, name: str) -> bool:
        """Return whether the tools of the server `name` can be called."""
        return self._connections[name].is_open

    def close(self) -> None:
        """End all connections and processes."""
        self.stop()
        closing = [each.close() for each in self._connections.values()] if self._started else []
        concurrent.futures.wait(closing, mcp_client.CLOSE_S)
        self._loop.close()

    def _offer(self) -> None:
        """Label the tools of all servers. What cannot be declared to a model is left out, with a notice."""
        every = [(server, each) for server, listed in self._listed.items() for each in listed]
        plain = [_label(each.name) for _, each in every]
        found: dict[str, OfferedTool] = {}
        size = 0
        for (server, each), label in zip(every, plain, strict=True):
            if plain.count(label) > 1:
                label = _label(f"{server}__{label}")
            free = (label, *(f"{label}_{number}" for number in range(2, len(every) + 2)))
            label = next(name for name in free if name not in found)
            offered = OfferedTool(server, each.name, label, each.description, each.schema)
            why, bytes = _declarable(offered)
            if not why and (len(found) == MOST_OFFERED or size + bytes > MOST_DECLARED):
                why = "the limit on the number of tools has been reached"
            if why:
                self._notices.append(f"{server}: the tool {label} was skipped: {why}")
            else:
                found[label], size = offered, size + bytes
        self.tools, self._offered = tuple(found.values()), set(self._listed)

    # ---- permissions

    def _check_allowed(self) -> None:
        """A notice, once, for what is allowed in advance and matches no tool."""
        known = {name for each in self.tools for name in _names(each)}
        unknown, self._unchecked = [each for each in self._unchecked if each not in known], ()
        self._notices += [f"--mcp-allow {each}: no such tool" for each in unknown]

    def permission(self, tool: OfferedTool) -> Permission:
        """Return the permission to call the tool."""
        known = self._permissions.get((tool.server, tool.name))
        if known is not None:
            return known
        return Permission.ALLOWED if _names(tool) & set(self._allowed) else Permission.ASK

    def set_permission(self, label: str, permission: Permission) -> None:
        """Set it for this chat. Raises LocalqError (exit 2) for an unknown tool."""
        if (tool := self.find(label)) is None:
            known = ", ".join(each.label for each in self.tools) or "none"
            raise usage_error("/tools", f"no such tool: {label[:60]!r}", f"Available tools: {known}.")
        self._permissions[tool.server, tool.name] = permission

    def find(self, label: str) -> OfferedTool | None:
        """The tool with this label."""
        return next((each for each in self.tools if each.label == label), None)

    # ---- a call

    def ask(self, tool: OfferedTool, arguments: str, is_stopped: Callable[[], bool]) -> Decision | None:
        """The user's decision about a call; None: there is nobody to ask. SESSION and NEVER are kept."""
        if self.asker is None:
            return None
        question = Question(tool, arguments)
        with self._guard:
            self._question = question
        if is_stopped():  # `stop` came before
            question.answer(Decision.STOP)
        self.asker(question)
        decision = question.wait()
        with self._guard:
            self._question = None
        if decision in (Decision.SESSION, Decision.NEVER):
            kept = Permission.ALLOWED if decision is Decision.SESSION else Permission.NEVER
            self._permissions[tool.server, tool.name] = kept
        return decision

    def call(self, tool: OfferedTool, arguments: str, is_stopped: Callable[[], bool]) -> ToolResult | None:
        """Run a call and return its result, up to the limit; None: `stop` has ended it."""
        running = self._connections[tool.server].call(tool.name, json.loads(arguments), self.limits.seconds)
        with self._guard:
            self._call = running
        if is_stopped():  # `stop` came before
            running.cancel()
        try:
            return running.result().limit(self.limits.characters)
        except (concurrent.futures.CancelledError, TimeoutError):
            return None
        finally:
            with self._guard:
                self._call = None

    def stop(self) -> None:
        """End the question or the call that waits, from any thread."""
        with self._guard:
            question, running = self._question, self._call
        if question is not None:
            question.answer(Decision.STOP)
        if running is not None:
            running.cancel()


def _declarable(tool: OfferedTool) -> tuple[str, int]:
    """Return why a tool cannot be declared to a model, or "", and the size of its declaration in bytes."""
    try:
        size = len(json.dumps(tool.declared.to_dict()))
    except LocalqError as error:
        return error.why, 0
    return ("its declaration is too long" if size > MOST_DECLARATION else ""), size


def _names(tool: OfferedTool) -> set[str]:
    """The names by which a tool is allowed in advance."""
    return {tool.label, f"{tool.server}.{tool.name}", f"{tool.server}{ANY}"}


def _label(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name).strip("_")[:_LABEL] or "tool"
