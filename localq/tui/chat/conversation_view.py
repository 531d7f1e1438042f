"""The conversation on the screen: starts jobs and draws their results.

A job posts messages; a streaming reply is polled a few times a second.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.message import Message
from textual.timer import Timer

from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.tui.chat import session_job
from localq.tui.chat.conversation_jobs import ConversationJobs
from localq.tui.chat.part_cache import PartCache
from localq.tui.chat.reply_buffer import EVERY_S
from localq.tui.chat.status_line import SENDING
from localq.tui.chat.transcript_view import TranscriptView
from localq.tui.chat.turn_view import TurnView
from localq.tui.jobs.model_handle import ModelHandle
from localq.tui.jobs.thread_messages import WatcherNotice

if TYPE_CHECKING:  # start-up cost: `preload` imports them
    from localq.chat.commands.host import Host
    from localq.chat.history.conversation import Message as ChatMessage
    from localq.chat.history.record import Record
    from localq.chat.history.store import ConversationStore
    from localq.chat.reply import Replies
    from localq.chat.session import ChatSession
    from localq.chat.tools.permissions import Question
    from localq.tui.reply.reply_text import CopyRequested, ReplyText
    from localq.tui.terminal.terminal_app import TerminalApp

RESTS = 4  # pause before drawing the next piece, in times of drawing the last
REST_S = 0.5  # at most


class ConversationView(PartCache, ConversationJobs):
    """Turns, with messages, commands and actions on them."""

    app: TerminalApp

    class EditRequested(Message):
        """The user wants to edit turn `number`, whose text is `text`."""

        def __init__(self, number: int, text: str) -> None:
            super().__init__()
            self.number, self.text = number, text

    class CallAsked(Message):
        """The model calls a tool; the job waits for the answer."""

        def __init__(self, question: Question) -> None:
            super().__init__()
            self.question = question

    def __init__(self, host: Host, record: Record | None = None, id: str | None = None) -> None:
        """host: for commands. record: shown until a model is open."""
        super().__init__(id=id)
        self._host, self._record = host, record
        self._live: TurnView | None = None
        self._looks: Timer | None = None
        self._is_due = False  # a poll is queued
        self._rests_until_s = 0.0  # monotonic: keys first
        self._extends: ChatMessage | None = None  # the reply that the running one continues

    def compose(self) -> ComposeResult:
        """The turns."""
        yield TranscriptView(id="transcript")

    async def show_record(self) -> None:
        """Show a resumed conversation before the model is loaded."""
        if self._record is not None and self.model is None:
            await self.transcript.sync(self._record.conversation)

    @property
    def transcript(self) -> TranscriptView:
        """The turns."""
        return self.part(TranscriptView)

    @property
    def number(self) -> int | None:
        """Number of the conversation, once it is saved."""
        return None if self.model is None else self.model.session.record.id

    async def use_model(self, model: ModelHandle) -> None:
        """Continue the chat with `model`."""
        self.model = model
        if (toolbox := model.session.tools.toolbox) is not None:
            toolbox.asker = lambda question: self.post_message(self.CallAsked(question))
            # Not a worker, for which the app would wait at its end: a server may take long to start.
            threading.Thread(target=self._report_tools, args=(model.session,), daemon=True).start()
        await self.draw()

    def _report_tools(self, session: ChatSession) -> None:
        """Show which tools the model gets, once their servers have started."""
        for line in session.tool_report():
            self.post_message(WatcherNotice(sanitize(line)))

    @on(CallAsked)
    def _ask_about_call(self, message: CallAsked) -> None:
        """Ask the user about a tool call; the job waits."""
        from localq.tui.chat.call_screen import CallScreen  # start-up cost

        message.stop()
        if not message.question.is_answered:
            self.app.push_screen(CallScreen(message.question, self.stop_job))

    async def draw(self) -> None:
        """Draw the session's conversation."""
        if self.model is not None:
            await self.transcript.sync(self.model.session.conversation)

    # ---- jobs

    def send_message(self, text: str, edited: int | None = None) -> None:
        """Send a message; edited: the turn that it replaces."""
        from localq.chat import commands

        assert self.model is not None
        session = self.model.session

        def ask() -> Replies:
            if edited is not None:
                return session.edit(text, edited)
            notices, replies = commands.ask_with_files(session, text, shows_chips=True)
            for line in notices:
                self.post_message(session_job.JobNotice(line))
            return replies

        self.start(ask)

    def run_command(self, line: str) -> None:
        """Run a slash command; show an error for an unknown one."""
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
        """Resume another conversation."""
        if self.model is None:
            self.notify("The model is not loaded yet.", markup=False)
            return
        session = self.model.session

        def take_up() -> str:
            record = store.load(id)
            session.save()
            session.switch_to(record)
            return ""

        self.start(take_up)

    # ---- results of jobs

    @on(session_job.ReplyBegan)
    async def _begin(self) -> None:
        """Draw the message and an empty reply."""
        assert self.model is not None
        reading = self.transcript.focused_view is not None
        await self.transcript.sync(self.model.session.conversation, live=True)
        loaded = self.model.session.loaded
        self._live = await self.transcript.begin(reading, loaded.name if loaded is not None else "")
        if not reading:  # after sending, follow the answer
            self.transcript.anchor()
        self._looks = self.set_interval(EVERY_S, self._remind)
        self.post_message(self.Doing(doing=SENDING, thinking=False))

    def show_phase(self, phase: str) -> None:
        """Show what the running reply is doing in its headline."""
        if self._live is not None and self._feed is not None and not self.app.input_priority.is_waiting:
            self._live.show_phase(phase)

    def _remind(self) -> None:
        """Queue a poll: stopping the timer would cancel work in its task, and lose text that is taken and not drawn."""
        if not self._is_due and not self.app.input_priority.is_waiting and time.monotonic() >= self._rests_until_s:
            self._is_due = True
            self.call_later(self._look_again)

    async def _look_again(self) -> None:
        began_s = time.monotonic()
        try:
            await self._look()
        finally:  # after an error in drawing the next text is still drawn
            self._is_due, self._rests_until_s = False, time.monotonic() + REST_S
        self.call_after_refresh(self._drawn, began_s)

    def _drawn(self, began_s: float) -> None:
        """Pause in proportion to the time of drawing: growth lays out the whole conversation, and keys go first."""
        now_s = time.monotonic()
        self._rests_until_s = now_s + min(REST_S, RESTS * (now_s - began_s))

    async def _look(self) -> None:
        """Draw the new text of a reply."""
        feed, view = self._feed, self._live
        taken = None if feed is None else feed.take()
        if taken is None or view is None or taken.stats is None:
            return
        if view.is_empty and (taken.text or taken.thought or taken.rounds) and self.model is not None:
            conversation = self.model.session.conversation
            await self.transcript.sync(conversation, live=True)  # removes the reply that this one replaces
            if self._extends is not None:
                for earlier in self._extends.rounds:
                    await view.end_round(earlier)
                await view.grow(self._extends.thought, self._extends.answer)
        if self.model is not None and (loaded := self.model.session.loaded) is not None:
            view.name_model(loaded.name)
        is_thought = bool(taken.thought) and not taken.text
        self.post_message(self.Doing(stats=taken.stats, doing=taken.doing, thinking=is_thought))
        for ended in taken.rounds:
            await view.end_round(ended)
        await view.grow(taken.thought, taken.text)
        for notice in taken.notices:
            await self.transcript.notice(notice)

    @on(session_job.JobNotice)
    async def _tell_of(self, message: session_job.JobNotice) -> None:
        """Draw changes of a job, and its notice."""
        await self.draw()
        if message.text:
            await self.transcript.notice(message.text)

    @on(session_job.JobFailed)
    async def _tell_failure(self, message: session_job.JobFailed) -> None:
        """Show an error; the next message starts a new engine process if this one died."""
        await self.transcript.notice(str(message.error), failed=True)

    @on(session_job.JobEnded)
    async def _end(self) -> None:
        """Draw the end of a job."""
        if self._looks is not None:
            self._looks.stop()
        try:
            await self._look()
            if self._live is not None and self.model is not None:
                await self.transcript.end_reply(self._live, self.model.session.conversation)
        finally:  # an error in drawing does not leave the chat busy
            self._live = self._looks = self._extends = None
            self.finish_job()

    # ---- actions on a turn

    @on(TranscriptView.TurnRequested)
    async def _want_turn(self, message: TranscriptView.TurnRequested) -> None:
        message.stop()
        if self.model is None or self.busy:
            self.notify("The model is busy; Esc stops it.", markup=False)
            return
        session = self.model.session
        conversation = session.conversation
        turn = conversation.turns[message.number]
        asked = message.number if turn.message.role == "user" else turn.parent
        assert asked is not None
        if message.what == "edit":
            self.post_message(self.EditRequested(asked, conversation.turns[asked].message.words))
        elif message.what == "regenerate":
            if asked != conversation.last_user():
                conversation.head = asked  # what followed stays on its own branch
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
        """Copy a code block or a turn."""
        message.stop()
        self.run_aside(lambda: self._host.copy(message.text))

    async def on_markdown_link_clicked(self, message: ReplyText.LinkClicked) -> None:
        """Show the address of a link; nothing is opened."""
        message.stop()
        await self.transcript.notice(f"link: {message.href}")
