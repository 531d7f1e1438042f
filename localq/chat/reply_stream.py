"""One reply as it comes from the engine: its events become pieces of text, and an end with what is to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from localq import harmony, thinking
from localq.grammar import keeps
from localq.incoming import Incoming
from localq.replies import Piece, Replies, Reply, notices
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

if TYPE_CHECKING:
    from localq.tokenizer import Tokenizer


class Client(Protocol):
    """What a session needs of `worker.client.EngineClient`; tests script it."""

    @property
    def alive(self) -> bool: ...
    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded: ...
    def generate(self, request: Generate) -> Iterator[Event]: ...
    def cancel(self, id: int) -> None: ...
    def save_cache(self, path: str) -> int: ...
    def restore_cache(self, path: str) -> int: ...


def incoming(tokenizer: Tokenizer, prompt: list[int], stop_strings: tuple[str, ...] = (), begun: str = "") -> Incoming:
    """For the reply to `prompt` (token ids), which may have the beginning of it: `begun`, or an opened thought."""
    last = prompt[-thinking.TAIL_TOKENS :]
    if harmony.is_template(tokenizer.chat_template):
        made = Incoming(harmony.Marked(tokenizer, begun, last), stop_strings)
        if begun:
            made.begin(begun, ())
        return made
    opened = "" if begun else thinking.opened(tokenizer.decode(last))
    made = Incoming(tokenizer.stream(), stop_strings, opened, channels=False)
    if begun:
        made.begin(begun, last)
    return made


def streamed(client: Client, request: Generate, into: Incoming, warned_before: bool) -> Replies:
    """Stream the reply to `request`. warned_before: a context nearly full was told of. Raises as the client does."""
    for event in client.generate(request):
        if isinstance(event, Progress):
            yield Piece("", event.stats)
        elif isinstance(event, Tokens) and not into.ended():
            pieces = into.push(event.ids)
            if into.ended():
                client.cancel(request.id)
            yield from (Piece(text, event.stats, thinking=thinks) for text, thinks in pieces or [("", False)])
        elif isinstance(event, Done):
            yield from (
                Piece(text, event.stats, thinking=thinks) for text, thinks in into.finish(cut=event.reason != "stop")
            )
            reason = "stop" if into.ended() else event.reason
            cut = into.ended() or reason != "stop"  # else the engine saw to it, also to what only a model can tell
            unmet = request.grammar if cut and request.grammar and not keeps(request.grammar, into.answer) else None
            told = notices(reason, event.stats, warned_before, into.thinking, unmet)
            yield Reply(into.answer, reason, event.stats, told, into.thought, unmet)
