"""A conversation with a model: messages in, pieces of text out, over an engine client. The front ends draw what this
decides.

Knows text, templates and the few messages of the engine process; knows neither tensors nor terminals. Nothing that was
said is lost: a reply that fails or is stopped stays as far as it came, what is replaced stays on a branch of its own,
and where there is a store every turn is saved as it ends. The next message starts a new engine if the old one died.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from localq import overflow, template, thinking
from localq.conversation import Conversation, Message
from localq.errors import LocalqError, usage_error
from localq.incoming import Incoming
from localq.replies import Piece, Replies, Reply, notices
from localq.sampling import Sampling
from localq.session_record import ChatSettings, Session
from localq.sessions import SessionStore
from localq.snapshot_keeper import SnapshotKeeper
from localq.stats import Stats
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

if TYPE_CHECKING:
    from localq.tokenizer import Tokenizer

__all__ = ["ChatSession", "Client", "Message", "Piece", "Replies", "Reply"]

FRAME_BYTES = 64  # that a template writes around a message: few write as many


class Client(Protocol):
    """What a session needs of `worker.client.EngineClient`; tests script it."""

    @property
    def alive(self) -> bool: ...
    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded: ...
    def generate(self, request: Generate) -> Iterator[Event]: ...
    def cancel(self, id: int) -> None: ...
    def save_cache(self, path: str) -> int: ...
    def restore_cache(self, path: str) -> int: ...


@dataclass
class ChatSession:
    """A conversation, settings and an engine client. `ask`, `edit` and `regenerate` stream; all else is immediate.

    sampling      is laid over the model's own defaults by the caller
    max_tokens    None = until a stop token
    stop_strings  an answer ends before the first of these
    think         "auto" (as the model was made), "on", "off" or a level; `set_think` checks it
    record        the conversation as it is saved; `go_on` takes another
    store         None = nothing is saved
    keeper        brings back what the model has read of a conversation; None = it is read again
    attached      texts that go before the next message
    unsaved       the last `save` failed or was broken off
    """

    client: Client
    request: Load
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    think: str = "auto"
    record: Session = field(default_factory=Session)
    store: SessionStore | None = None
    keeper: SnapshotKeeper | None = None
    attached: list[str] = field(default_factory=list)
    loaded: Loaded | None = None
    last: Reply | None = None
    unsaved: bool = False

    def __post_init__(self) -> None:
        self._ids = itertools.count(1)
        self._running: int | None = None
        self._read_from: int | None = None  # the first turn that the model reads, where older ones are left out

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

    def leave(self) -> None:
        """Keep what the model has read of the conversation, before the client is closed; an interrupt breaks it off.

        For an end that is no error; the conversation itself is saved already. `keeper.told` says what went wrong.
        """
        if self.keeper is not None:
            self.keeper.leave(self.client)

    # ---- the conversation

    @property
    def conversation(self) -> Conversation:
        """The tree of what was said."""
        return self.record.conversation

    @property
    def messages(self) -> list[Message]:
        """The system prompt, and the turns of the current branch as far as they are answered."""
        return [*self._framed([]), *self.conversation.messages()]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.conversation.system

    @system.setter
    def system(self, text: str | None) -> None:
        self.conversation.system = text or None

    def set_think(self, think: str) -> None:
        """Whether, or how much, the model thinks. Raises LocalqError (exit 2) where it has no such choice."""
        thinking.variables(self.tokenizer.chat_template, think)
        self.think = think

    def clear(self) -> None:
        """Begin anew in the same conversation; the system prompt stays, what was said is a branch of its own."""
        self.conversation.head = None
        self.attached.clear()

    def ask(self, text: str) -> Replies:
        """Add a user turn and stream the answer: Pieces, then one Reply. After an error `regenerate` tries again."""
        turn = self.conversation.say("\n\n".join([*self.attached, text]))
        self.attached.clear()
        self.keep()  # a process that is killed while it loads or answers has kept the question
        return self._answer(turn)

    def regenerate(self) -> Replies:
        """Answer the last user turn again; the reply it had stays beside the new one."""
        turn = self.conversation.last_user()
        if turn is None:
            raise usage_error("/regen", "there is no message to answer again", "Say something first.")
        return self._answer(turn)

    def edit(self, text: str, turn: int | None = None) -> Replies:
        """Say `text` in place of a message of the user (None = the last) and stream the answer."""
        added = self.conversation.edit_user(text, turn)
        self.keep()
        return self._answer(added)

    def _answer(self, turn: int) -> Replies:
        record = self.record  # the reply belongs here, whatever conversation is gone on with meanwhile
        conversation, before = record.conversation, record.conversation.head
        conversation.head, ended = turn, False
        incoming = Incoming(self.tokenizer.stream())
        try:
            loaded = self.ensure_loaded()
            prompt, notice = self._fitting(loaded)
            if self.keeper is not None:
                self.keeper.take_up(self.client, record, loaded)
            if notice:
                yield Piece("", Stats(context_size=loaded.context_size), notice)
            incoming = self._incoming(prompt)
            for part in self._streamed(prompt, loaded, incoming):
                if isinstance(part, Piece):
                    yield part
                    continue
                ended = True
                if self.keeper is not None:
                    self.keeper.replied(part.stats)
                message = Message("assistant", incoming.raw, part.reason == "stop")
                unsaved = self._said(record, message, turn, part.stats)
                yield dataclasses.replace(part, notices=(*part.notices, *unsaved))
        finally:
            if incoming.raw and not ended:  # nothing is lost: what had arrived stays, marked as cut
                self._said(record, Message("assistant", incoming.raw, complete=False), turn)
            elif not ended and before != turn:
                conversation.head = before  # a reply that is not replaced stays where it was

    def _said(self, record: Session, message: Message, turn: int, stats: Stats | None = None) -> tuple[str, ...]:
        record.conversation.add(message, turn, stats)
        return tuple(filter(None, (self.keep(record),)))

    # ---- what the model reads

    def prompt(self) -> list[int]:
        """Token ids of what the model would read for the current branch as it stands."""
        return self._ids_without(self.conversation.path(), self._left_out(self.conversation.path()))

    def prompt_text(self) -> str:
        """The text of `prompt`, special tokens as they are written."""
        messages, variables = self._templated(self.prompt_messages())
        return self.tokenizer.chat_text(messages, **variables)

    def prompt_messages(self) -> list[Message]:
        """The messages of `prompt`."""
        path = self.conversation.path()
        return self._framed(path[2 * self._left_out(path) :])

    def _fitting(self, loaded: Loaded) -> tuple[list[int], str]:
        """Ids of the path to the head, and what to tell where the oldest turns of it are left out."""
        path = self.conversation.path()
        before, exchanges = self._left_out(path), len(path) // 2
        found = overflow.fitting(
            lambda left_out: self._ids_if_short(path, left_out), exchanges, before, loaded.context_size, self.max_tokens
        )
        self._read_from = path[2 * found.left_out] if found.left_out else None
        return found.ids, overflow.said(found, before)

    def _left_out(self, path: list[int]) -> int:
        """Exchanges at the beginning of `path` that the model does not read."""
        first = self._read_from
        return path.index(first) // 2 if first is not None and first in path else 0

    def _ids_without(self, path: list[int], left_out: int) -> list[int]:
        messages, variables = self._templated(self._framed(path[2 * left_out :]))
        return self.tokenizer.chat_ids(messages, **variables)

    def _templated(self, messages: Sequence[Message]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """What a chat template is given: the messages, and its variables."""
        return [each.to_dict() for each in messages], thinking.variables(self.tokenizer.chat_template, self.think)

    def _ids_if_short(self, path: list[int], left_out: int) -> list[int] | None:
        """`_ids_without`, or None where templates take no conversation as long."""
        messages = self._framed(path[2 * left_out :])
        size = sum(len(each.content.encode("utf-8", "replace")) + FRAME_BYTES for each in messages)
        return self._ids_without(path, left_out) if size <= template.MAX_CONVERSATION_BYTES else None

    def _framed(self, turns: Sequence[int]) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return system + [self.conversation.turns[turn].message for turn in turns]

    # ---- keeping

    def go_on(self, record: Session) -> None:
        """Leave this conversation, which is saved, for another; its settings hold if it was with the same model."""
        if record.settings is not None and record.model == self.record.model:
            chosen = record.settings
            self.sampling, self.max_tokens, self.stop_strings = chosen.sampling, chosen.max_tokens, chosen.stop
            self.think = chosen.think
        record.model = self.record.model
        self.record, self.last, self._read_from = record, None, None
        self.attached.clear()

    def save(self, record: Session | None = None) -> None:
        """Save this conversation, or `record`, where there is a store. Raises LocalqError where that fails."""
        record = record or self.record
        if self.store is not None and record.conversation.turns:
            if record is self.record:
                record.settings = ChatSettings(self.sampling, self.max_tokens, self.stop_strings, self.think)
            self.unsaved = True
            self.store.save(record)
            self.unsaved = False

    def keep(self, record: Session | None = None) -> str:
        """`save`; where it fails, what to tell: the turns are kept here and saved with the next that can be."""
        try:
            self.save(record)
        except LocalqError as error:
            return f"not saved, and tried again with the next turn: {error}"
        return ""

    # ---- a reply

    def complete(self, prompt: list[int], loaded: Loaded) -> Replies:
        """Stream the continuation of `prompt` (token ids) without touching the conversation."""
        return self._streamed(prompt, loaded, self._incoming(prompt))

    def _incoming(self, prompt: list[int]) -> Incoming:
        """For the reply to `prompt`, whose end may have opened a thought."""
        tail = self.tokenizer.decode(prompt[-thinking.TAIL_TOKENS :])
        return Incoming(self.tokenizer.stream(), self.stop_strings, thinking.opened(tail))

    def _streamed(self, prompt: list[int], loaded: Loaded, incoming: Incoming) -> Replies:
        breakers = sorted(self.tokenizer.breaker_ids) if self.sampling.dry else []
        generate = Generate(
            next(self._ids),
            prompt,
            self.sampling,
            sorted(self.tokenizer.stop_ids),
            self.max_tokens,
            breaker_ids=breakers,
        )
        warned_before = self.last is not None and self.last.stats.context_fill >= overflow.WARNING
        self._running = generate.id
        try:
            for event in self.client.generate(generate):
                if isinstance(event, Progress):
                    yield Piece("", event.stats)
                elif isinstance(event, Tokens) and not incoming.ended():
                    pieces = incoming.push(event.ids)
                    if incoming.ended():
                        self.client.cancel(generate.id)
                    yield from (Piece(text, event.stats, thinking=thinks) for text, thinks in pieces or [("", False)])
                elif isinstance(event, Done):
                    yield from (Piece(text, event.stats, thinking=thinks) for text, thinks in incoming.finish())
                    reason = "stop" if incoming.ended() else event.reason
                    told = notices(reason, event.stats, warned_before, incoming.thinking)
                    self.last = Reply(incoming.answer, reason, event.stats, told, incoming.thought)
                    yield self.last
        finally:
            self._running = None
