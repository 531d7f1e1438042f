"""The chat screen: what its messages and keys do."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.binding import BindingType
from textual.dom import DOMNode

from localq.chat.terminal.input_history import InputHistory
from localq.errors import LocalqError
from localq.stats import Stats
from localq.tui.chat import status_line
from localq.tui.chat.chat_layout import ChatLayout
from localq.tui.chat.composer import Composer
from localq.tui.chat.composer_area import ComposerArea
from localq.tui.chat.conversation_view import ConversationView
from localq.tui.chat.session_job import JobFailed
from localq.tui.chat.sidebar import Sidebar
from localq.tui.chat.status_line import READY, SENDING, WORKING, StatusLine
from localq.tui.chat.transcript_view import TranscriptView
from localq.tui.chat.turn_view import TurnView
from localq.tui.instruments.instrument_panel import InstrumentPanel, InstrumentsScreen
from localq.tui.jobs.command_host import TuiHost
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, WatcherNotice
from localq.tui.key_line import hints
from localq.tui.keys import bindings

if TYPE_CHECKING:
    from localq.chat.history.record import Record
    from localq.tui.chat.sessions_panel import SessionsPanel
    from localq.tui.jobs.model_handle import ModelHandle
    from localq.worker.messages import Loaded

NOTED_S = 0.2  # a command that runs for longer is shown in the status line
PROMPT_KEYS = ("send", "stop", "help", "palette", "models", "instruments", "sidebar", "newline")
TURN_KEYS = ("stop", "edit", "regenerate", "copy_turn", "branch_before", "turn_before")
SAVING_IS_OFF = "Saving is off (--no-save, or\nsave = false in the settings)."
SAVING_FAILED = "Saving failed; will retry\nafter the next turn."
LEAVE_WITHIN_S = 2.0  # a second Esc or Ctrl-C on an empty prompt within this time quits


class ChatScreen(ChatLayout):
    """The screen of one conversation at a time."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("stop"),
        *bindings("new", "thinking", "sessions", "sidebar", "instruments", "copy", "jump", priority=True),
        *bindings("profile", "page_up", "page_down", priority=True),
    ]

    def __init__(self, past: InputHistory, record: Record | None = None, empty: bool = False) -> None:
        """record: shown until a model is open. empty: no parts until `fill`, as another screen is shown first."""
        super().__init__(past, record, empty)
        self._interrupted_at = -LEAVE_WITHIN_S
        self._edited: int | None = None  # the turn that the next message replaces
        self._loaded: Loaded | None = None  # the load that the instruments show
        self._waiting = ""  # a message sent before the model was loaded

    # ---- status

    def status(self, **changes: object) -> None:
        """Change fields of the status line (`status_line.Status`)."""
        shown = self.part(StatusLine)
        shown.status = dataclasses.replace(shown.status, **changes)  # type: ignore[arg-type]

    def _draw_status(self) -> None:
        """Draw the status line at once, before anything else."""
        self.draw_alone(self.part(StatusLine))

    @on(ConversationView.Doing)
    def _doing(self, message: ConversationView.Doing) -> None:
        self.status(**message.changes)
        self._show_keys()
        if message.changes.get("stopping"):
            self._draw_status()
        stats = message.changes.get("stats")
        if isinstance(stats, Stats):
            self.instruments.show_stats(stats)

    @on(ConversationView.Free)
    def _free(self) -> None:
        self.instruments.end_reply()
        self._show_model()
        self._show_stats()
        self.part(Sidebar).reload(self.conversation.number, self._unsaved)

    @on(InstrumentPanel.ProfileRequested)
    def _profile(self) -> None:
        self.conversation.profile(self.instruments.show_profile, self.instruments.show_no_profile)

    def on_watcher_notice(self, message: WatcherNotice) -> None:
        """Show a notice about opening a model."""
        self.call_later(self.conversation.transcript.notice, message.text)

    def on_fetching(self, message: Fetching) -> None:
        """Show progress of a fetch."""
        what = f"downloading {message.what}" if message.total else message.what  # else a check or a pause
        self.status(doing=status_line.transfer_text(what, message.done, message.total))

    def on_loading_stage(self, message: LoadingStage) -> None:
        """Show progress of a load."""
        self.status(doing=status_line.transfer_text(message.stage, message.done, message.total))

    async def begin(self, then: Callable[[], object]) -> None:
        """Show the resumed conversation, `then` open the model, whose imports would delay it."""
        await self.conversation.show_record()
        self.call_after_refresh(then)

    async def use_model(self, model: ModelHandle) -> None:
        """Continue the chat with `model`; send a queued message."""
        await self.conversation.use_model(model)
        self.status(doing=READY)
        self._show_model()
        self._show_stats()
        waiting, self._waiting = self._waiting, ""
        if waiting:
            self._send(waiting)

    def _show_model(self) -> None:
        self.show_project()
        model = self.conversation.model
        if model is not None and model.session.loaded is not None:
            loaded = model.session.loaded
            self.status(model=loaded.name, format=loaded.format, device=loaded.device_name)
            if loaded is not self._loaded:
                self._loaded = loaded
                self.instruments.show_model(loaded, model.session.request.options.vram_bytes)
                self.conversation.transcript.welcome.show_model(loaded)

    def _show_stats(self) -> None:
        """Show statistics of this conversation's last reply, unless the prompt has changed since (model, summary)."""
        model = self.conversation.model
        if model is not None:
            talk, loaded = model.session.conversation, model.session.loaded
            last = talk.last_reply()
            stats = None if last is None else talk.turns[last].stats
            if stats is not None and stats != self.part(StatusLine).status.stats:
                is_read = (
                    talk.model_context()[0] is None and loaded is not None and loaded.context_size == stats.context_size
                )
                stats = stats if is_read else None
            self.status(stats=stats)

    # ---- sending

    @on(Composer.Sent)
    def _sent(self, message: Composer.Sent) -> None:
        line = message.text.strip()
        if _resolve_alias(line) == "/exit":
            self.app.leave()
        elif self.conversation.busy and not self.conversation.is_profiling:
            self.composer.give_back(message.text)
            self.notify("A reply is in progress; Esc stops it.", markup=False)
        else:
            self.composer.past.add(message.text)
            if self.conversation.model is None:
                self._waiting = message.text
                self.call_later(
                    self.conversation.transcript.notice, f"queued until the model is loaded: {message.text}"
                )
            else:
                self._send(message.text)

    def _send(self, text: str) -> None:
        edited, self._edited = self._edited, None
        self._interrupted_at = -LEAVE_WITHIN_S  # stopping this reply does not count as a first press
        if text.startswith("/") and not text.startswith("//"):
            self._do(text.strip())
        else:
            self.status(doing=SENDING)
            self._draw_status()
            self.conversation.send_message(text.removeprefix("/"), edited)

    def _do(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        if _resolve_alias(name) == "/help" and not argument:
            self.app.action_help()
        elif self.conversation.model is not None:
            self.conversation.run_command(line)
            self.set_timer(NOTED_S, self._note_work)
        else:
            self.notify("The model is not loaded yet.", markup=False)

    def _note_work(self) -> None:
        """Show that a command still runs; a short one would only flicker."""
        if self.conversation.busy and self.part(StatusLine).status.doing == READY:
            self.status(doing=WORKING)

    def take_command(self, name: str, whole: bool) -> None:
        """Run a command from the palette, or put it into the prompt if it takes arguments."""
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
        self.notify("Editing: sending replaces the message; Esc cancels.", markup=False)

    # ---- keys

    def on_mount(self) -> None:
        """Show the keys of what has the focus."""
        self.watch(self, "focused", self._show_keys)

    async def fill(self) -> None:
        """As in the base; with the keys."""
        await super().fill()
        self._show_keys()

    def _focus_path(self) -> list[DOMNode]:
        return [] if self.focused is None else self.focused.ancestors_with_self

    def _show_keys(self) -> None:
        for composer in self.query(Composer):  # none until `fill`
            is_turn = any(isinstance(each, TurnView) for each in self._focus_path())
            names = TURN_KEYS if is_turn else PROMPT_KEYS
            is_prompt = self.focused in (None, composer)
            stop = "stop" if self.conversation.busy else "twice: quit" if is_prompt else "prompt"
            composer.show_keys(hints(self.app.settings.keys, names, stop=stop))

    def action_stop(self) -> None:
        """Copy a selection, close a list, stop a reply, cancel an edit; twice on an empty prompt: quit."""
        if selected := self.get_selected_text():
            self.conversation.run_aside(lambda: TuiHost(self.app).copy(selected))
            self.clear_selection()
        elif self.part(ComposerArea).close_list():
            pass
        elif self.conversation.busy:
            self.conversation.stop_job()
        elif self._edited is not None:
            self._edited = None
            self.composer.put("")
        elif not self.composer.has_focus:
            if any(isinstance(each, Sidebar) for each in self._focus_path()):
                self.remove_class("sidebar")
            self._back_to_writing()
        elif self.composer.text:
            self.notify("Ctrl-Q quits.", markup=False)
        elif time.monotonic() - self._interrupted_at < LEAVE_WITHIN_S:
            self.app.leave()
        else:
            self._interrupted_at = time.monotonic()
            self.notify("Press again to quit.", timeout=LEAVE_WITHIN_S, markup=False)

    def action_new(self) -> None:
        """Start a new conversation."""
        self._do("/new")

    def action_copy(self) -> None:
        """Copy the last reply."""
        self._do("/copy")

    def action_thinking(self) -> None:
        """Show or hide thinking."""
        self.conversation.transcript.toggle_thinking()

    async def action_sidebar(self) -> None:
        """Show or hide the list of conversations."""
        self.toggle_class("sidebar")
        if self.has_class("sidebar"):
            await self._open_sidebar()
        else:
            self.composer.focus()

    async def action_sessions(self) -> None:
        """Search conversations."""
        self.add_class("sidebar")
        await self._open_sidebar(search=True)

    async def _open_sidebar(self, search: bool = False) -> None:
        store, number = self.app.start_with.search_store, self.conversation.number
        await self.part(Sidebar).open(store, number, self._unsaved, search)

    @property
    def _unsaved(self) -> str:
        """Reason the open conversation is not saved; empty if it is, or has nothing to save yet."""
        model = self.conversation.model
        if self.app.start_with.store is None:
            return SAVING_IS_OFF
        return SAVING_FAILED if model is not None and model.session.record in model.session.unsaved else ""

    def on_sessions_panel_chosen(self, message: SessionsPanel.Chosen) -> None:
        """Resume the chosen conversation."""
        self.conversation.resume(self.app.start_with.search_store, message.id)
        self._back_to_writing()

    def on_sessions_panel_new(self) -> None:
        """Start a new conversation."""
        self.action_new()
        self._back_to_writing()

    def _back_to_writing(self) -> None:
        if self.has_class("-narrow"):
            self.remove_class("sidebar")
        self.composer.focus()

    def action_profile(self) -> None:
        """Profile a decode step, after the running reply."""
        self.instruments.action_profile()

    def action_instruments(self) -> None:
        """Show or hide the instruments; from the strip, show them on the whole screen first."""
        if self.instruments.mode == "side" or not self.has_class("instruments"):
            self.toggle_class("instruments")
        else:
            self.app.push_screen(InstrumentsScreen(self.instruments), self._after_instruments)

    def _after_instruments(self, _: None) -> None:
        self.remove_class("instruments")

    def action_jump(self) -> None:
        """Switch the focus between prompt and conversation."""
        if self.composer.has_focus:
            self.conversation.transcript.focus_last()
        else:
            self.composer.focus()

    def action_page_up(self) -> None:
        """Scroll the conversation one page up."""
        self.conversation.transcript.scroll_page_up(animate=False)

    def action_page_down(self) -> None:
        """Scroll the conversation one page down."""
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
            self.composer.put(self.app.edit_text(self.composer.text, "Type your message here."))
        except LocalqError as error:
            self.conversation.post_message(JobFailed(error))


def _resolve_alias(name: str) -> str:
    """The command of an alias."""
    from localq.chat.commands import ALIASES  # start-up cost

    return ALIASES.get(name, name)
