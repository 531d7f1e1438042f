"""An open model without files and engine process, for tests of the slot: a script says what each reply is."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from localq.chat.open_model import OpenSession, Watcher
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.server.model import ModelRequest
from localq.stats import Stats
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Tokens
from tests.support.chat.scripted_client import CharTokenizer

DEAD = LocalqError("engine process", "stopped unexpectedly (signal SIGKILL)", "Your next message starts a new one.")


class SteadyClient:
    """Counts up to the end of a reply. `gate` closed: it waits before each token, as a slow engine does.

    log   what it was asked, in order
    """

    def __init__(self, log: list[str]) -> None:
        self.log, self.alive, self.pid = log, False, 1
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.cancelled: set[int] = set()
        self.die_at: int | None = None
        self.load_error: LocalqError | None = None

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        self.log.append(f"load {request.options.name}")
        if self.load_error is not None:
            raise self.load_error
        self.alive = True
        return Loaded(request.options.name, "cpu", "test CPU", "float32", "bf16", 1000, 256, False, 0.0)

    def close(self) -> None:
        self.alive = False
        self.log.append("close")

    def cancel(self, id: int) -> None:
        self.cancelled.add(id)
        self.gate.set()

    def generate(self, request: Generate) -> Iterator[Event]:
        for count in range(request.max_tokens or 3):
            self.begun.set()
            self.gate.wait(10)
            if request.id in self.cancelled:
                yield Done(request.id, "cancelled", Stats("done", generated_tokens=count))
                return
            if count == self.die_at:
                self.alive = False
                raise DEAD
            yield Tokens(request.id, [count], Stats("decode", generated_tokens=count + 1))
        yield Done(request.id, "length", Stats("done", generated_tokens=request.max_tokens or 3))

    def save_cache(self, path: str) -> int:
        return 0

    def restore_cache(self, path: str) -> int:
        return 0


class QuietWatcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def agree(self, cost: Any) -> bool:
        return False

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[Callable[..., None]]:
        yield lambda *_: None

    def loading(self, event: Event) -> None:
        pass


class Models:
    """An `Opener` of scripted models. log: loads and closes of all of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clients: list[SteadyClient] = []
        self.unknown: set[str] = set()

    @contextlib.contextmanager
    def __call__(self, request: ModelRequest, watcher: Watcher) -> Iterator[OpenSession]:
        if request.name in self.unknown:
            raise LocalqError(request.name, "no such model")
        client = SteadyClient(self.log)
        self.clients.append(client)
        session = ChatSession(client, Load("path", LoadOptions(request.name)), CharTokenizer())  # type: ignore[arg-type]
        session.record.model = request.name
        try:
            yield OpenSession(session, client)  # type: ignore[arg-type]
        finally:
            client.close()
