"""The screen of a conversation: the conversation itself, the message, what else is shown beside them, and the keys."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import BindingType

from localq.chat.terminal.input_history import InputHistory
from localq.errors import ExitCode, LocalqError
from localq.stats import Stats
from localq.tui.chat import status_line
from localq.tui.chat.chat_layout import ChatLayout
from localq.tui.chat.composer import Composer
from localq.tui.chat.composer_area import ComposerArea
from localq.tui.chat.conversation_view import ConversationView
from localq.tui.chat.session_job import JobFailed
from localq.tui.chat.sidebar import Sidebar
from localq.tui.chat.status_line import StatusLine
from localq.tui.chat.transcript_view import TranscriptView
from localq.tui.instruments.instrument_panel import InstrumentPanel, InstrumentsScreen
from localq.tui.jobs.command_host import TuiHost
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, WatcherNotice
from localq.tui.keys import bindings

if TYPE_CHECKING:
    from localq.chat.history.record import Record
    from localq.tui.chat.sessions_panel import SessionsPanel
    from localq.tui.jobs.model_handle import ModelHandle
    from localq.worker.messages import Loaded

LEAVE_WITHIN_S = 2.0  # Esc or Ctrl-C a second time at an empty message leaves


class ChatScreen(ChatLayout):
    """Everything about one conversation at a time."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("stop"),
        *bindings("new", "thinking", "sessions", "sidebar", "instruments", "copy", "jump", priority=True),
        *bindings("profile", "page_up", "page_down", priority=True),
    ]

    def __init__(self, past: InputHistory, record: Record | None = None, empty: bool = False) -> None:
        """record: shown until there is a model. empty: until `fill`, because another screen is seen first."""
        super().__init__(past, record, empty)
        self._interrupted_at = -LEAVE_WITHIN_S
        self._edited: int | None = None  # the turn that the next message is said in place of
        self._loaded: Loaded | None = None  # what the instruments know
        self._waiting = ""  # a message that was sent before there was a model

    # ---- what goes on

    def status(self, **changes: object) -> None:
        """Show these in the line below: fields of `status_line.Status`."""
        shown = self.query_one(StatusLine)
        shown.status = dataclasses.replace(shown.status, **changes)  # type: ignore[arg-type]

    @on(ConversationView.Doing)
    def _doing(self, message: ConversationView.Doing) -> None:
        self.status(**message.changes)
        if message.changes.get("stopping"):  # seen at once, whatever else is to be drawn
            self.draw_alone(self.query_one(StatusLine))
        stats = message.changes.get("stats")
        if isinstance(stats, Stats):
            self.instruments.show_stats(stats)

    @on(ConversationView.Free)
    def _free(self) -> None:
        self.instruments.reply_ended()
        self._show_model()
        self._show_stats()
        self.query_one(Sidebar).reload(self.conversation.number)

    @on(InstrumentPanel.ProfileRequested)
    def _profile(self) -> None:
        self.conversation.profile(self.instruments.show_profile, self.instruments.show_no_profile)

    def on_watcher_notice(self, message: WatcherNotice) -> None:
        """Something to know about how a model is opened."""
        self.call_later(self.conversation.transcript.notice, message.text)

    def on_fetching(self, message: Fetching) -> None:
        """Bytes of a model."""
        self.status(doing=status_line.transfer_text(f"fetching {message.what}", message.done, message.total))

    def on_loading_stage(self, message: LoadingStage) -> None:
        """The engine process loads."""
        self.status(doing=status_line.transfer_text(message.stage, message.done, message.total))

    async def begin(self, then: Callable[[], object]) -> None:
        """Show what is gone on with, and open the model `then`: what that imports would hold the other up."""
        await self.conversation.show_record()
        self.call_after_refresh(then)

    async def use_model(self, model: ModelHandle) -> None:
        """Converse with it; what was sent meanwhile is said now."""
        await self.conversation.use_model(model)
        self.status(doing="ready")
        self._show_model()
        self._show_stats()
        waiting, self._waiting = self._waiting, ""
        if waiting:
            self._send(waiting)

    def _show_model(self) -> None:
        model = self.conversation.model
        if model is not None and model.session.loaded is not None:
            loaded = model.session.loaded
            self.status(model=loaded.name, format=loaded.format, device=loaded.device_name)
            if loaded is not self._loaded:
                self._loaded = loaded
                self.instruments.show_loaded(loaded)

    def _show_stats(self) -> None:
        """Of the last reply of this conversation; not of another, nor where the model reads something else since."""
        model = self.conversation.model
        if model is not None:
            talk, loaded = model.session.conversation, model.session.loaded
            last = talk.last_reply()
            stats = None if last is None else talk.turns[last].stats
            if stats is not None and stats != self.query_one(StatusLine).status.stats:
                is_read = talk.model_context()[0] is None and loaded is not None and loaded.context_size == stats.context_size
                stats = stats if is_read else None
            self.status(stats=stats)

    # ---- saying something

    @on(Composer.Sent)
    def _sent(self, message: Composer.Sent) -> None:
        line = message.text.strip()
        if _meant(line) == "/exit":
            self.app.leave()
        elif self.conversation.busy:
            self.composer.give_back(message.text)
            self.notify("A reply is on its way: Esc stops it.", markup=False)
        else:
            self.composer.past.add(message.text)
            if self.conversation.model is None:
                self._waiting = message.text
                self.call_later(self.conversation.transcript.notice, f"said when the model is there: {message.text}")
            else:
                self._send(message.text)

    def _send(self, text: str) -> None:
        edited, self._edited = self._edited, None
        self._interrupted_at = -LEAVE_WITHIN_S  # what stops this reply is no second press
        if text.startswith("/") and not text.startswith("//"):
            self._do(text.strip())
        else:
            self.conversation.send_message(text.removeprefix("/"), edited)

    def _do(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if _meant(name) == "/help" and not argument:
            self.app.action_help()
        elif self.conversation.model is not None:
            self.conversation.run_command(line)
        else:
            self.notify("Not now: there is no model yet.", markup=False)

    def take_command(self, name: str, whole: bool) -> None:
        """Out of the palette: done as if it were sent, or begun in the message where more words may follow."""
        if whole:
            self.post_message(Composer.Sent(name))
        else:
            self.composer.put(f"{name} {self.composer.text}")
            self.composer.focus()

    @on(ConversationView.EditRequested)
    def _edit(self, message: ConversationView.EditRequested) -> None:
        self._edited = message.number
        self.composer.put(message.text)
        self.composer.focus()
        self.notify("Sent, it is said in place of that message. Esc leaves that as it was.", markup=False)

    # ---- keys

    def action_stop(self) -> None:
        """Stop what runs; at an empty message, twice within LEAVE_WITHIN_S, leave."""
        if selected := self.get_selected_text():
            self.conversation.run_aside(lambda: TuiHost(self.app).copy(selected))
            self.clear_selection()
        elif self.query_one(ComposerArea).close_list():
            pass
        elif self.conversation.busy:
            self.conversation.stop_job()
        elif self._edited is not None:
            self._edited = None
            self.composer.put("")
        elif not self.composer.has_focus:
            self._back_to_writing()
        elif self.composer.text:
            self.notify("Ctrl-Q leaves.", markup=False)
        elif time.monotonic() - self._interrupted_at < LEAVE_WITHIN_S:
            self.app.leave(ExitCode.INTERRUPTED)
        else:
            self._interrupted_at = time.monotonic()
            self.notify("Once more leaves.", timeout=LEAVE_WITHIN_S, markup=False)

    def action_new(self) -> None:
        """Another conversation."""
        self._do("/new")

    def action_copy(self) -> None:
        """The last reply."""
        self._do("/copy")

    def action_thinking(self) -> None:
        """Fold or unfold what was thought."""
        self.conversation.transcript.toggle_thinking()

    async def action_sidebar(self) -> None:
        """Show or hide the conversations."""
        self.toggle_class("sidebar")
        if self.has_class("sidebar"):
            await self.query_one(Sidebar).open(self.app.start_with.search_store, self.conversation.number)
        else:
            self.composer.focus()

    async def action_sessions(self) -> None:
        """Look for one."""
        self.add_class("sidebar")
        await self.query_one(Sidebar).open(self.app.start_with.search_store, self.conversation.number, search=True)

    def on_sessions_panel_chosen(self, message: SessionsPanel.Chosen) -> None:
        """Go on with it."""
        self.conversation.resume(self.app.start_with.search_store, message.id)
        self._back_to_writing()

    def on_sessions_panel_new(self) -> None:
        """Begin one."""
        self.action_new()
        self._back_to_writing()

    def _back_to_writing(self) -> None:
        if self.has_class("-narrow"):
            self.remove_class("sidebar")
        self.composer.focus()

    def action_profile(self) -> None:
        """Time a step, once no reply runs."""
        self.instruments.action_profile()

    def action_instruments(self) -> None:
        """Show or hide them; where they are a strip, all of them over the whole screen comes between."""
        if self.instruments.mode == "side" or not self.has_class("instruments"):
            self.toggle_class("instruments")
        else:
            self.app.push_screen(InstrumentsScreen(self.instruments), self._after_instruments)

    def _after_instruments(self, _: None) -> None:
        self.remove_class("instruments")

    def action_jump(self) -> None:
        """Between the message and the conversation."""
        if self.composer.has_focus:
            self.conversation.transcript.focus_last()
        else:
            self.composer.focus()

    def action_page_up(self) -> None:
        """The conversation, wherever the focus is."""
        self.conversation.transcript.scroll_page_up(animate=False)

    def action_page_down(self) -> None:
        """The conversation, wherever the focus is."""
        self.conversation.transcript.scroll_page_down(animate=False)

    @on(TranscriptView.WriteRequested)
    def _write(self) -> None:
        self.composer.focus()

    @on(Composer.LeaveRequested)
    def _leave(self) -> None:
        self.app.leave()

    @on(Composer.EditorRequested)
    def _open_editor(self) -> None:
        try:
            self.composer.put(self.app.edit_text(self.composer.text, "Write it here."))
        except LocalqError as error:
            self.conversation.post_message(JobFailed(error))


def _meant(name: str) -> str:
    """The command that an alias stands for."""
    from localq.chat.commands import ALIASES  # start-up cost

    return ALIASES.get(name, name)
