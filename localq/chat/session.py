"""A running chat: messages in, pieces of text out, over an engine client. Front ends draw the result.

No text is lost: a reply that fails or is stopped keeps what arrived, a replaced turn stays on its own branch, and with
a store every turn is saved when it ends. After the engine process died, the next message starts a new one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localq import drafts
from localq.chat import reply_stream
from localq.chat.attachments import Attachment
from localq.chat.client import Client
from localq.chat.history.conversation import Conversation, Message
from localq.chat.history.record import ChatSettings, Record
from localq.chat.partial_answer import AnswerParts, PartialAnswer
from localq.chat.prompt import WARNING, ExactIds, PromptBuilder, marks, messages_of
from localq.chat.reply import Replies, Reply, ReplyPiece
from localq.chat.reply_limits import ANSWER_TOKENS, NO_LIMITS, ReplyLimits
from localq.chat.reply_stream import ReplyDecoder
from localq.chat.tools.tool_use import ToolUse
from localq.errors import LocalqError, usage_error
from localq.sampling import Sampling
from localq.settings import OF_LOAD, Origin
from localq.stats import Stats
from localq.text import thinking
from localq.text.grammar import Grammar
from localq.worker.messages import Event, Generate, Load, Loaded

if TYPE_CHECKING:
    from localq.chat.history.snapshot_keeper import SnapshotKeeper
    from localq.chat.history.store import ConversationStore
    from localq.text.tokenizer import Tokenizer


@dataclass
class ChatSession:
    """A conversation, settings and an engine client. `ask`, `edit`, `regenerate` and `continue_reply` stream.

    sampling      complete: the caller has merged it with the model's defaults
    max_tokens    tokens of a reply with its thought; None: the default length of an answer (`reply_limits`)
    loop_guard    a reply that repeats itself is stopped
    stop_strings  an answer ends before the first of these
    grammar       constraint of every answer; None: no constraint
    think         "auto" (the model's default), "on", "off" or a level; `set_think` checks it
    think_budget  tokens after which a thought is ended; None: no limit
    draft, draft_max  source of drafts or draft model, and tokens of a draft at most (`localq.drafts`); replies stay the
                  same
    record        the conversation as it is saved; `switch_to` replaces it
    store         None = nothing is saved
    keeper        saves and restores the KV cache of a conversation; None: the prompt is read again
    attached      files and texts to put before the next message
    unsaved       conversations whose last `save` failed or was interrupted
    in_chat       False: one answer is all, so notices name options instead of commands
    origins       settings that a project's file has decided; `decided` has those that still count
    tools         what the model may call; none at first
    """

    client: Client
    request: Load
    tokenizer: Tokenizer
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    loop_guard: bool = True
    stop_strings: tuple[str, ...] = ()
    grammar: Grammar | None = None
    think: str = "auto"
    think_budget: int | None = None
    draft: str = drafts.AUTO
    draft_max: int = drafts.MOST
    record: Record = field(default_factory=Record)
    store: ConversationStore | None = None
    keeper: SnapshotKeeper | None = None
    attached: list[Attachment] = field(default_factory=list)
    loaded: Loaded | None = None
    last: Reply | None = None
    unsaved: list[Record] = field(default_factory=list)
    in_chat: bool = True
    origins: dict[str, Origin] = field(default_factory=dict)
    tools: ToolUse = field(default_factory=ToolUse)

    def __post_init__(self) -> None:
        self.request_ids = itertools.count(1)
        self._running: int | None = None
        self._stopping = False
        self._reading = PromptBuilder(self.tokenizer)

    # ---- the engine

    def ensure_loaded(self, on_event: Callable[[Event], None] | None = None) -> Loaded:
        """Load the model unless the running engine has it loaded."""
        if self.loaded is None or not self.client.alive:
            self.loaded = None
            self.loaded = self.client.load(self.request, on_event)
        return self.loaded

    def stop(self) -> None:
        """Stop the reply, also one that has not begun; callable from any thread. Its reason is "cancelled"."""
        self._stopping = True
        self.tools.stop()
        if self._running is not None:
            self.client.cancel(self._running)

    def clear_stop(self) -> None:
        """Forget an earlier `stop`: the next one stops what is streamed next."""
        self._stopping = False

    def save_snapshot(self) -> None:
        """Save the KV cache of the conversation, before the client is closed; an interrupt cancels it.

        The conversation itself is saved already. Errors are in `keeper.take_notice`.
        """
        if self.keeper is not None:
            self.keeper.save(self.client)

    # ---- the conversation

    @property
    def conversation(self) -> Conversation:
        """The tree of turns."""
        return self.record.conversation

    @property
    def messages(self) -> list[Message]:
        """The system prompt and the answered turns of the current branch."""
        return [*messages_of(self.conversation, []), *self.conversation.messages()]

    @property
    def system(self) -> str | None:
        """The system prompt."""
        return self.conversation.system

    @system.setter
    def system(self, text: str | None) -> None:
        self.conversation.system = text or None

    @property
    def decided(self) -> dict[str, str]:
        """Settings in force that a project's file has decided, and its path: those that are not changed since."""
        now = {**dataclasses.asdict(self.sampling), "max_tokens": self.max_tokens, "think": self.think}
        now |= {"system": self.system, "think_budget": self.think_budget}
        now |= {"draft": self.draft, "draft_max": self.draft_max}
        return {name: each.source for name, each in self.origins.items() if now.get(name, each.value) == each.value}

    def settings(self) -> ChatSettings:
        """The settings as they are saved."""
        origins = {name: path for name, path in self.decided.items() if name not in OF_LOAD}
        chosen = self.sampling, self.max_tokens, self.stop_strings, self.think, self.grammar, self.loop_guard
        return ChatSettings(*chosen, origins, self.think_budget, self.preserve_thinking)

    def set_think(self, think: str) -> None:
        """Set thinking: "auto", "on", "off" or a level. Raises LocalqError (exit 2) for a mode it lacks."""
        thinking.variables(self.tokenizer.chat_template, think)
        self.think = think

    @property
    def preserve_thinking(self) -> str:
        """Retention of earlier replies' thoughts in prompts: "on", "off", or "auto" (the model's default)."""
        return self._reading.preserve

    def set_preserve_thinking(self, choice: str) -> None:
        """Set `preserve_thinking`. Raises LocalqError (exit 2) for a model that has no such choice."""
        thinking.preservation(self.tokenizer.chat_template, choice)
        self._reading.preserve = choice

    def clear(self) -> None:
        """Start over in the same conversation; the system prompt is kept, earlier turns stay on their branch."""
        self.conversation.head = None
        self.attached.clear()

    def ask(self, text: str, attached: Sequence[Attachment] = ()) -> Replies:
        """Add a user turn and stream the answer: pieces, then one Reply. After an error `regenerate` tries again.

        attached   put before the text, after those of `self.attached`
        """
        files = [each.measure(self.count_tokens) for each in (*self.attached, *attached)]
        turn = self.conversation.add_user(text, files)
        self.attached.clear()
        self.try_save()  # saved before the load: a process that is killed then has kept the question
        return self._answer(turn)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself."""
        return len(self.tokenizer.encode(text))

    def regenerate(self) -> Replies:
        """Answer the last user turn again; its earlier reply stays as another version.

        A notice comes first where the sampling chooses the same tokens again.
        """
        turn = self.conversation.last_user()
        if turn is None:
            raise usage_error("/regen", "there is no message to answer", "Send a message first.")
        has_reply = any(each.parent == turn for each in self.conversation.turns)
        notice = self.sampling.repeated_notice() if has_reply else ""
        return _after_notice(notice, self._answer(turn))

    def edit(self, text: str, turn: int | None = None) -> Replies:
        """Replace the words of a user message (None: the last) with `text` and stream the answer."""
        added = self.conversation.edit_user(text, turn)
        self.try_save()
        return self._answer(added)

    def continue_reply(self) -> Replies:
        """Continue the last reply where it stopped: pieces are the new text, the final Reply is all of it.

        The shorter reply stays as another version; where nothing is added, it is the only one.
        """
        reply = self.conversation.final_reply("/continue", "continue")
        turn = self.conversation.turns[reply].parent
        assert turn is not None
        return self._answer(turn, reply)

    def _answer(self, turn: int, extended: int | None = None) -> Replies:
        """Answer the message `turn`, or continue its reply `extended`."""
        self.clear_stop()
        return self._answering(turn, extended)

    def _answering(self, turn: int, extended: int | None) -> Replies:
        record = self.record  # the reply belongs here, also after a switch to another conversation
        conversation, before, think = record.conversation, record.conversation.head, self.think
        begun, exact = self._reading.reply_start(conversation, extended, think, self.grammar is not None)
        rounds = () if extended is None else conversation.turns[extended].message.rounds
        conversation.head, ended = turn, False
        answer = PartialAnswer(self.tokenizer, rounds, begun, exact)
        try:
            end = yield from self._make(answer, record, think)
            if end is None:
                return
            ended = True
            if (begun or extended is not None) and not answer.grown:
                conversation.head = before
                nothing = ("the model added nothing",) if end.reason == "stop" else ()
                yield dataclasses.replace(end, notices=(*end.notices, *nothing))
                return
            unsaved = self._add_reply(record, answer.message(end.reason == "stop"), turn, end.stats)
            if (ids := answer.exact_ids()) is not None:
                self._reading.exact = ExactIds(conversation, len(conversation.turns) - 1, think, ids)
            yield dataclasses.replace(end, notices=(*end.notices, *unsaved))
        finally:
            if answer.grown and not ended:  # keep what arrived, marked as incomplete
                self._add_reply(record, answer.message(complete=False), turn)
            elif not ended and before != turn:
                conversation.head = before  # a reply that is not replaced stays where it was

    def _make(self, answer: PartialAnswer, record: Record, think: str) -> AnswerParts:
        """Stream replies of the model until one calls no tools; returns its end."""
        loaded = self.ensure_loaded()
        parser = yield from self.tools.offer(self._reading, self.grammar is not None, lambda: self._stopping)
        while True:
            prompt, notice = self._reading.fit(
                record.conversation,
                lambda messages: self._reading.ids_with_start(messages, think, answer.begun, answer.exact),
                loaded.context_size, self.max_tokens, self.in_chat, answer.rounds,
            )  # fmt: skip
            if self.keeper is not None:
                self.keeper.restore(self.client, record, loaded)
            if notice:
                yield ReplyPiece("", Stats(context_size=loaded.context_size), notice)
            incoming = answer.begin(
                reply_stream.reply_decoder(self.tokenizer, prompt, self.stop_strings, answer.begun, parser and parser())
            )
            end = None
            for part in self.stream(self.generate_request(prompt, incoming, answer.begun), incoming, self.limits):
                if isinstance(part, ReplyPiece):
                    yield part
                else:
                    end = part
            if end is not None and self.keeper is not None:
                self.keeper.record_reply(end.stats)
            if end is None or end.reason != "stop" or not end.calls:
                return end
            calling = self.tools.call(end, answer, record.conversation, lambda: self._stopping, self.count_tokens)
            if reason := (yield from calling):
                return answer.cut_short(end, reason, self.in_chat)

    def _add_reply(self, record: Record, message: Message, turn: int, stats: Stats | None = None) -> tuple[str, ...]:
        record.conversation.add(message, turn, stats, self.loaded.name if self.loaded is not None else "")
        return tuple(filter(None, (self.try_save(record),)))

    # ---- what the model reads

    def tool_report(self, summary: bool = True) -> list[str]:
        """Lines about MCP servers, and with `summary` which tools the model gets; waits until they have started."""
        return self.tools.report(self._reading, summary)

    def prompt(self) -> list[int]:
        """Token ids of the prompt for the current branch."""
        return self._reading.ids(self.prompt_messages(), self.think)

    def prompt_text(self) -> str:
        """The text of `prompt`, special tokens as they are written."""
        return self._reading.text(self.prompt_messages(), self.think)

    def prompt_messages(self) -> list[Message]:
        """The messages of `prompt`."""
        return self._reading.messages(self.conversation)

    # ---- keeping

    def switch_to(self, record: Record) -> None:
        """Switch to another conversation; this one is saved already.

        Stop strings and grammar are those saved with it; the other settings only if it used the same model.
        """
        if (chosen := record.settings) is not None:
            self.stop_strings, self.grammar = chosen.stop, chosen.grammar
            if record.model == self.record.model:
                self.sampling, self.max_tokens, self.think = chosen.sampling, chosen.max_tokens, chosen.think
                self.loop_guard, self.think_budget = chosen.loop_guard, chosen.think_budget
                self._reading.preserve = chosen.preserve_thinking
        saved = {name: each for name, each in record.origins().items() if name != "model"}  # the loaded one stays
        record.model = self.record.model
        self.record, self.last, self._reading.first = record, None, None
        before, self.origins = self.origins, saved
        self.origins = {**before, **{name: saved[name] for name in self.decided}}
        self.attached.clear()

    def save(self, record: Record | None = None) -> None:
        """Save this conversation, or `record`, if there is a store. Raises LocalqError where that fails."""
        record = record or self.record
        if self.store is not None and record.conversation.turns:
            if record is self.record:
                record.settings = self.settings()
            self.unsaved = [*(each for each in self.unsaved if each is not record), record]
            self.store.save(record)
            self.unsaved = [each for each in self.unsaved if each is not record]

    def save_unsaved(self) -> None:
        """Try again with every conversation that is `unsaved`. Raises LocalqError where that fails."""
        for each in self.unsaved:
            self.save(each)

    def try_save(self, record: Record | None = None) -> str:
        """`save`; return a notice where it fails (else ""): the turns are kept and saved with a later turn."""
        try:
            self.save(record)
            self.save_unsaved()
        except LocalqError as error:
            return f"not saved (will retry after the next turn): {error}"
        return ""

    # ---- a reply

    def complete(self, prompt: list[int], loaded: Loaded) -> Replies:
        """Stream the continuation of `prompt` (token ids) without touching the conversation."""
        incoming = reply_stream.reply_decoder(self.tokenizer, prompt, self.stop_strings)
        return self.stream(self.generate_request(prompt, incoming), incoming, self.limits)

    @property
    def limits(self) -> ReplyLimits:
        """Limits of a reply in the conversation."""
        return ReplyLimits(ANSWER_TOKENS if self.max_tokens is None else None, self.loop_guard)

    def generate_request(self, prompt: list[int], incoming: ReplyDecoder, begun: str = "") -> Generate:
        """The request for a continuation of `prompt` (token ids), which may end with the start `begun` of the reply.

        It is decoded by `incoming`.
        """
        breakers = sorted(self.tokenizer.breaker_ids) if self.sampling.has_dry else []
        return Generate(
            next(self.request_ids), prompt, self.sampling, sorted(self.tokenizer.stop_ids), self.max_tokens,
            breaker_ids=breakers, grammar=self.grammar, grammar_begun=incoming.answer if self.grammar else "",
            grammar_after=incoming.closing if self.grammar and incoming.thinking else "",
            think_budget=self.think_budget, begun=begun if self.think_budget is not None else "",
            marks=marks(self.tokenizer, prompt),
            draft_tokens=0 if self.draft == drafts.OFF else self.draft_max,
            ask_draft_model=drafts.asks_model(self.draft, is_named=bool(self.request.options.draft_path)),
        )  # fmt: skip

    def stream(self, generate: Generate, incoming: ReplyDecoder, limits: ReplyLimits = NO_LIMITS) -> Replies:
        """Stream the reply to a request; `stop` ends it."""
        warned_before = self.last is not None and self.last.stats.context_fill >= WARNING
        self._running = generate.id
        if self._stopping:  # `stop` came before the request
            self.client.cancel(generate.id)
        try:
            for part in reply_stream.stream(
                self.client, generate, incoming, warned_before, limits, self.tokenizer.decode, self.in_chat
            ):
                if isinstance(part, Reply):
                    self.last = part
                yield part
        finally:
            self._running = None


def _after_notice(notice: str, replies: Replies) -> Replies:
    if notice:
        yield ReplyPiece("", Stats(), notice)
    yield from replies
