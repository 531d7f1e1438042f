"""`Client`: what a chat uses of the engine client (`worker.client.EngineClient`); tests script it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from localq.worker.messages import Event, Generate, Load, Loaded


class Client(Protocol):
    """Loads a model, generates replies, saves and restores the KV cache."""

    @property
    def alive(self) -> bool: ...
    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded: ...
    def generate(self, request: Generate) -> Iterator[Event]: ...
    def cancel(self, id: int) -> None: ...
    def save_cache(self, path: str) -> int: ...
    def restore_cache(self, path: str) -> int: ...
