"""`JobClient`: the engine client as one job of the slot sees it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from localq.chat.client import Client
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

_NUMBERS = itertools.count(1)  # of replies of this process, whoever asked for them


class JobClient:
    """A `Client` whose replies end when the job is cancelled.

    Replies get numbers of their own: those of two jobs, each of which counts from 1, would be mixed up, since events of
    a cancelled reply may still arrive.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._stopped = False
        self._running: dict[int, int] = {}  # number that the job uses -> number of the engine

    @property
    def alive(self) -> bool:
        """True while the engine process runs."""
        return self._client.alive

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        """As `EngineClient.load`."""
        return self._client.load(request, on_event)

    def generate(self, request: Generate) -> Iterator[Event]:
        """As `EngineClient.generate`; a cancelled job gets `Done` ("cancelled")."""
        number = next(_NUMBERS)
        self._running[request.id] = number
        if self._stopped:
            self._client.cancel(number)
        try:
            for event in self._client.generate(dataclasses.replace(request, id=number)):
                if isinstance(event, Progress | Tokens | Done):
                    yield dataclasses.replace(event, id=request.id)
        finally:
            self._running.pop(request.id, None)

    def cancel(self, id: int) -> None:
        """Stop the reply `id` within one step."""
        if (number := self._running.get(id)) is not None:
            self._client.cancel(number)

    def stop(self) -> None:
        """Stop the running reply and later ones; callable from any thread."""
        self._stopped = True
        for number in list(self._running.values()):
            self._client.cancel(number)

    def save_cache(self, path: str) -> int:
        """As `EngineClient.save_cache`."""
        return self._client.save_cache(path)

    def restore_cache(self, path: str) -> int:
        """As `EngineClient.restore_cache`."""
        return self._client.restore_cache(path)
