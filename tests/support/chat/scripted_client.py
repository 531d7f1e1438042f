"""Sessions for headless chat tests, their client and tokenizer: replies are scripted, can stall, fail, be cancelled."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from localq.chat.history.store import ConversationStore
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.stats import Stats
from localq.text.turn_marks import NO_MARKS
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

DEAD = LocalqError("engine process", "stopped unexpectedly (signal SIGKILL)", "The next message starts a new one.")


class CharTokenizer:
    """One token per character; renders a conversation as "<role>content" with a final "<assistant>"."""

    stop_ids = frozenset({0})
    chat_template: str | None = "scripted"
    turn_marks = NO_MARKS
    mark_ids: ClassVar[dict[int, str]] = {}
    over = False

    def chat_text(self, messages: list[dict[str, str]], **variables: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def chat_ids(self, messages: list[dict[str, str]], **variables: Any) -> list[int]:
        return [ord(letter) for letter in self.chat_text(messages, **variables)]

    def encode(self, text: str) -> list[int]:
        return self.prompt_ids(text)

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)

    def prompt_ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def stream(self) -> CharTokenizer:
        return self

    def push(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids)

    def finish(self) -> str:
        return ""


class ScriptedClient:
    """Answers each generate with the next script: a list of pieces (text or ids); an exception is raised there.

    `prompts` keeps what the engine was asked; `die()` makes it look dead until the next load.
    """

    def __init__(
        self, *scripts: list[str | list[int] | LocalqError], context_size: int = 1000, reason: str = "stop",
        forced: int = 0,
    ) -> None:  # fmt: skip
        self.scripts, self.context_size, self.reason = list(scripts), context_size, reason
        self.forced = forced  # tokens of a reply with a thinking budget that the engine forced
        self.prompts: list[str] = []
        self.generated: list[Generate] = []
        self.loads = 0
        self.alive = False
        self.cancelled = threading.Event()

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        self.loads += 1
        self.alive = True
        return Loaded(request.options.name, "cpu", "test CPU", "float32", "bf16", self.context_size, 256, False, 0.0)

    def cancel(self, id: int) -> None:
        self.cancelled.set()

    def die(self) -> None:
        self.alive = False

    def generate(self, request: Generate) -> Iterator[Event]:
        self.generated.append(request)
        self.prompts.append("".join(chr(i) for i in request.prompt))
        self.cancelled.clear()
        used = len(request.prompt)
        stats = Stats(prompt_tokens=used, context_used=used, context_size=self.context_size)
        yield Progress(request.id, stats)
        for part in self.scripts.pop(0):
            if isinstance(part, LocalqError):
                self.die()
                raise part
            if self.cancelled.is_set():
                yield Done(request.id, "cancelled", stats)
                return
            used += len(part)
            stats = Stats("decode", len(request.prompt), context_used=used, context_size=self.context_size)
            yield Tokens(request.id, [ord(letter) for letter in part] if isinstance(part, str) else part, stats)
        forced = self.forced if request.think_budget is not None else 0
        yield Done(request.id, self.reason, dataclasses.replace(stats, forced_tokens=forced))


def session_over(
    *scripts: list[str | list[int] | LocalqError],
    tokenizer: CharTokenizer | None = None,
    store: ConversationStore | None = None,
    **more: Any,
) -> ChatSession:
    """A chat with a `ScriptedClient`, which takes what is in `more`."""
    client = ScriptedClient(*scripts, **more)
    return ChatSession(client, Load("path", LoadOptions("model")), tokenizer or CharTokenizer(), store=store)


def streamed(parts: Iterable[ReplyPiece | Reply]) -> tuple[str, Reply, list[str]]:
    """The text as it streamed, the end, and every notice."""
    text, told, reply = "", [], None
    for part in parts:
        if isinstance(part, ReplyPiece):
            text += part.text
            told += [part.notice] if part.notice else []
        else:
            reply = part
    assert reply is not None
    return text, reply, [*told, *reply.notices]
