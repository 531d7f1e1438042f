"""A conversation: messages in, pieces of text out, over an engine client. Both front ends draw what this decides.

Knows text, templates and the few messages of the engine process; knows neither tensors nor terminals. A reply that
fails or is stopped loses nothing: what was said stays, and the next message starts a new engine if the old one died.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.sanitize import sanitize
from localq.stats import Stats
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

if TYPE_CHECKING:
    from localq.tokenizer import Tokenizer

CONTEXT_WARNING = 0.9  # share of the context at which the user is told, before it is full
_REASONS = {
    "context": "the context is full: the reply stops here; /clear starts anew",
    "length": "the reply reached its longest allowed length",
    "cancelled": "stopped",
}


class Client(Protocol):
    """What a session needs of `worker.client.EngineClient`; tests script it."""

    @property
    def alive(self) -> bool: ...
    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded: ...
    def generate(self, request: Generate) -> Iterator[Event]: ...
    def cancel(self, id: int) -> None: ...


@dataclass(frozen=True)
class Message:
    """One turn: role "system", "user" or "assistant". `complete` is False for a reply that was cut."""

    role: str
    content: str
    complete: bool = True

    def to_dict(self) -> dict[str, str]:
        """The form that chat templates take."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Piece:
    """Part of a reply as it streams; `text` may be empty while the prompt is read."""

    text: str
    stats: Stats


@dataclass(frozen=True)
class Reply:
    """The end of a reply: the whole text, why it ended ("stop", "length", "context", "cancelled"), and what to tell."""

    text: str
    reason: str
    stats: Stats
    notices: tuple[str, ...] = ()


@dataclass
class ChatSession:
    """Messages, settings and an engine client. `ask` and `regenerate` stream; everything else is immediate.

    sampling is laid over the model's own defaults by the caller; max_tokens None = until a stop token.
    """

    client: Client
    request: Load
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    messages: list[Message] = field(default_factory=list)
    loaded: Loaded | None = None
    last: Reply | None = None

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._running: int | None = None
        self._unanswered: str | None = None

    # ---- the engine

    def ensure_loaded(self, on_event: Callable[[Event], None] | None = None) -> Loaded:
        """Load the model unless a living engine holds it already."""
        if self.loaded is None or not self.client.alive:
            self.loaded = None
            self.loaded = self.client.load(self.request, on_event)
        return self.loaded

    def stop(self) -> None:
        """Ask the running reply to end; safe from another thread. The stream then ends with reason "cancelled"."""
        if self._running is not None:
            self.client.cancel(self._running)

    # ---- the conversation

    @property
    def system(self) -> str | None:
        """The system prompt."""
        first = self.messages[0] if self.messages else None
        return first.content if first and first.role == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = [message for message in self.messages if message.role != "system"]
        self.messages[:] = ([Message("system", text)] if text else []) + rest

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self.messages[:] = [message for message in self.messages if message.role == "system"]
        self._unanswered = None

    def ask(self, text: str) -> Iterator[Piece | Reply]:
        """Add a user turn and stream the answer: Pieces, then one Reply. After an error `regenerate` tries again."""
        yield from self._answer([*self.messages, Message("user", text)])

    def regenerate(self) -> Iterator[Piece | Reply]:
        """Answer the last user turn again, dropping the reply it had."""
        turns = list(self.messages)
        if self._unanswered is not None:
            turns.append(Message("user", self._unanswered))
        else:
            while turns and turns[-1].role == "assistant":
                turns.pop()
        if not turns or turns[-1].role != "user":
            raise LocalqError("/regen", "there is no message to answer again", "Say something first.", ExitCode.USAGE)
        yield from self._answer(turns)

    def _answer(self, turns: list[Message]) -> Iterator[Piece | Reply]:
        self._unanswered = turns[-1].content
        self.messages[:] = turns[:-1]
        loaded = self.ensure_loaded()
        prompt = self.tokenizer.chat_ids([turn.to_dict() for turn in turns])
        text = ""
        try:
            for part in self.complete(prompt, loaded):
                text += part.text if isinstance(part, Piece) else ""
                if isinstance(part, Reply):
                    self._unanswered = None
                    self.messages[:] = [*turns, Message("assistant", part.text, part.reason == "stop")]
                yield part
        except LocalqError:
            if text:  # nothing is lost: what had arrived stays, marked as cut
                self._unanswered = None
                self.messages[:] = [*turns, Message("assistant", text, complete=False)]
            raise

    def complete(self, prompt: list[int], loaded: Loaded) -> Iterator[Piece | Reply]:
        """Stream the continuation of `prompt` (token ids) without touching the conversation."""
        generate = Generate(
            next(self._ids), prompt, self.sampling, sorted(self.tokenizer.stop_ids), max_tokens=self.max_tokens
        )
        detokenizer = self.tokenizer.stream()
        text, warned_before = "", self.last is not None and self.last.stats.context_fill >= CONTEXT_WARNING
        self._running = generate.id
        try:
            for event in self.client.generate(generate):
                if isinstance(event, Progress):
                    yield Piece("", event.stats)
                elif isinstance(event, Tokens):
                    piece = sanitize(detokenizer.push(event.ids))
                    text += piece
                    yield Piece(piece, event.stats)
                elif isinstance(event, Done):
                    rest = sanitize(detokenizer.finish())
                    if rest:
                        yield Piece(rest, event.stats)
                    self.last = Reply(text + rest, event.reason, event.stats, _notices(event, warned_before))
                    yield self.last
        finally:
            self._running = None


def _notices(done: Done, warned_before: bool) -> tuple[str, ...]:
    notices = [_REASONS[done.reason]] if done.reason in _REASONS else []
    stats = done.stats
    if done.reason != "context" and stats.context_fill >= CONTEXT_WARNING and not warned_before:
        notices.append(
            f"the context is {stats.context_fill:.0%} full ({stats.context_used} of {stats.context_size} tokens): "
            "replies stop when it is full; /clear starts anew"
        )
    return tuple(notices)
