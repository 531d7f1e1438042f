"""The conversation on the screen and what is wished of it: what comes of a job is drawn here.

What a job says comes as a message; what a reply streams is looked for a few times a second.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.message import Message
from textual.timer import Timer

from localq.errors import LocalqError
from localq.tui.chat import session_job
from localq.tui.chat.conversation_jobs import ConversationJobs
from localq.tui.chat.reply_buffer import EVERY_S
from localq.tui.chat.transcript_view import TranscriptView
from localq.tui.chat.turn_view import TurnView
from localq.tui.jobs.model_handle import ModelHandle

if TYPE_CHECKING:  # start-up cost: `beforehand` imports them when the first frame is there
    from localq.chat.commands.host import Host
    from localq.chat.history.conversation import Message as ChatMessage
    from localq.chat.history.record import Record
    from localq.chat.history.store import ConversationStore
    from localq.chat.reply import Replies
    from localq.tui.reply.reply_text import CopyRequested, ReplyText
    from localq.tui.terminal.terminal_app import TerminalApp

RESTS = 4  # times what drawing a piece of a reply took, before the next is drawn
REST_S = 0.5  # at most


class ConversationView(ConversationJobs):
    """Turns, and what is said, commanded and wished of them."""

    app: TerminalApp

    class EditRequested(Message):
        """The user wants to say `text` otherwise, which is turn `number`."""

        def __init__(self, number: int, text: str) -> None:
            super().__init__()
            self.number, self.text = number, text

    def __init__(self, host: Host, record: Record | None = None, id: str | None = None) -> None:
        """host: for commands. record: shown until there is a model."""
        super().__init__(id=id)
        self._host, self._record = host, record
        self._live: TurnView | None = None
        self._looks: Timer | None = None
        self._is_due = False  # a look is waiting for its turn
        self._rests_until_s = 0.0  # monotonic: keys first
        self._extends: ChatMessage | None = None  # what the reply that runs goes on with

    def compose(self) -> ComposeResult:
        """The turns."""
        yield TranscriptView(id="transcript")

    async def show_record(self) -> None:
        """A conversation that is gone on with is there before the model; its turns take longer than the first frame."""
        if self._record is not None and self.model is None:
            await self.transcript.sync(self._record.conversation)

    @property
    def transcript(self) -> TranscriptView:
        """The turns."""
        return self.query_one(TranscriptView)

    @property
    def number(self) -> int | None:
        """Of the conversation, once it is saved."""
        return None if self.model is None else self.model.session.record.id

    async def use_model(self, model: ModelHandle) -> None:
        """Converse with it."""
        self.model = model
        await self.draw()

    async def draw(self) -> None:
        """Show the session's conversation as it is."""
        if self.model is not None:
            await self.transcript.sync(self.model.session.conversation)

    # ---- jobs

    def send_message(self, text: str, edited: int | None = None) -> None:
        """Ask the model; edited: in place of that turn."""
        from localq.chat import commands

        assert self.model is not None
        session = self.model.session

        def ask() -> Replies:
            if edited is not None:
                return session.edit(text, edited)
            told, replies = commands.ask_with_files(session, text)
            for line in told:
                self.post_message(session_job.JobNotice(line))
            return replies

        self.start(ask)

    def run_command(self, line: str) -> None:
        """Do what a line with a slash says; what is no command is told."""
        from localq.chat import commands

        assert self.model is not None
        session, host = self.model.session, self._host
        try:
            name, argument = commands.parse(line)
        except LocalqError as error:
            self.post_message(session_job.JobFailed(error))
            return
        last = session.conversation.last_reply() if name == "/continue" else None
        self._extends = None if last is None else session.conversation.turns[last].message
        self.start(lambda: commands.COMMANDS[name](session, argument, host))

    def resume(self, store: ConversationStore, id: int) -> None:
        """Go on with another conversation."""
        if self.model is None:
            self.notify("Not now: there is no model yet.", markup=False)
            return
        session = self.model.session

        def take_up() -> str:
            record = store.load(id)
            session.save()
            session.switch_to(record)
            return ""

        self.start(take_up)

    # ---- what comes back

    @on(session_job.ReplyBegan)
    async def _begin(self) -> None:
        """Show the question, and where the answer will be."""
        assert self.model is not None
        reading = self.transcript.focused_view is not None
        await self.transcript.sync(self.model.session.conversation, live=True)
        self._live = await self.transcript.begin(reading)
        if not reading:  # who says something wants to see the answer
            self.transcript.anchor()
        self._looks = self.set_interval(EVERY_S, self._remind)
        self.post_message(self.Doing(doing="", stats=None, thinking=False))

    def _remind(self) -> None:
        """Look in one's own turn: what runs in the timer's task is broken off where the timer is stopped, with what it
        has taken and not drawn."""
        if not self._is_due and not self.app.input_priority.is_waiting and time.monotonic() >= self._rests_until_s:
            self._is_due = True
            self.call_later(self._look_again)

    async def _look_again(self) -> None:
        began_s = time.monotonic()
        await self._look()
        self._is_due, self._rests_until_s = False, time.monotonic() + REST_S
        self.call_after_refresh(self._drawn, began_s)

    def _drawn(self, began_s: float) -> None:
        """Whatever grows has all of the conversation laid out again, which takes the longer the more of it there is:
        what is drawn next waits, so that keys have most of the time."""
        now_s = time.monotonic()
        self._rests_until_s = now_s + min(REST_S, RESTS * (now_s - began_s))

    async def _look(self) -> None:
        """Draw what has come of a reply."""
        feed, view = self._feed, self._live
        taken = None if feed is None else feed.take()
        if taken is None or view is None or taken.stats is None:
            return
        if view.is_empty and (taken.text or taken.thought) and self.model is not None:
            conversation = self.model.session.conversation
            await self.transcript.sync(conversation, live=True)  # a reply that this one replaces goes now
            if self._extends is not None:
                await view.grow(self._extends.thought, self._extends.answer)
        self.post_message(self.Doing(stats=taken.stats, doing="", thinking=bool(taken.thought) and not taken.text))
        await view.grow(taken.thought, taken.text)
        for notice in taken.notices:
            await self.transcript.notice(notice)

    @on(session_job.JobNotice)
    async def _tell_of(self, message: session_job.JobNotice) -> None:
        """What the job has changed, and a notice."""
        await self.draw()
        if message.text:
            await self.transcript.notice(message.text)

    @on(session_job.JobFailed)
    async def _tell_failure(self, message: session_job.JobFailed) -> None:
        """The chat goes on; the next message starts a new engine process if this one died."""
        await self.transcript.notice(str(message.error), failed=True)

    @on(session_job.JobEnded)
    async def _end(self) -> None:
        """All of it is here."""
        if self._looks is not None:
            self._looks.stop()
        await self._look()
        view, self._live, self._looks, self._extends = self._live, None, None, None
        if view is not None and self.model is not None:
            await self.transcript.end_reply(view, self.model.session.conversation)
        self.finish_job()

    # ---- wishes about a turn

    @on(TranscriptView.TurnRequested)
    async def _want_turn(self, message: TranscriptView.TurnRequested) -> None:
        message.stop()
        if self.model is None or self.busy:
            self.notify("Not now: the model is at work. Esc stops it.", markup=False)
            return
        session = self.model.session
        conversation = session.conversation
        turn = conversation.turns[message.number]
        asked = message.number if turn.message.role == "user" else turn.parent
        assert asked is not None
        if message.what == "edit":
            self.post_message(self.EditRequested(asked, conversation.turns[asked].message.content))
        elif message.what == "regenerate":
            if asked != conversation.last_user():
                conversation.head = asked  # what followed it stays, on a branch of its own
            self.start(session.regenerate)
        else:
            sisters = conversation.siblings(message.number)
            place = sisters.index(message.number) + message.step
            if 0 <= place < len(sisters):
                conversation.switch_to(sisters[place])
                self.start(session.try_save)
                await self.draw()
                self.transcript.focus_turn(sisters[place])

    def on_copy_requested(self, message: CopyRequested) -> None:
        """Of a block of code, or of a turn."""
        message.stop()
        self.run_aside(lambda: self._host.copy(message.text))

    async def on_markdown_link_clicked(self, message: ReplyText.LinkClicked) -> None:
        """Where it leads is told; nothing is opened."""
        message.stop()
        await self.transcript.notice(f"the link leads to {message.href}")
