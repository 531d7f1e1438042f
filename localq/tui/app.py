"""The app: screens, opening and switching models, quitting.

The model is opened in a thread after the first frame. `run` returns the exit code; the caller then calls `close`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from textual import work
from textual.app import SuspendNotSupported, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen

from localq import keymap
from localq.chat.open_conversation import Start, resumed_settings, without_model
from localq.chat.open_options import Opening, OpenOptions
from localq.chat.terminal import editor, error_log, input_history
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner.consent import ConsentError
from localq.settings import Settings
from localq.tui import preload
from localq.tui.chat.chat_screen import ChatScreen
from localq.tui.chat.session_job import SwitchRequested
from localq.tui.chat.status_line import ASKING, NO_MODEL
from localq.tui.jobs.chat_app import ChatApp
from localq.tui.jobs.job import Job
from localq.tui.jobs.model_handle import ModelHandle
from localq.tui.keys import bindings
from localq.tui.terminal import signals

if TYPE_CHECKING:
    from localq.chat.session import ChatSession
    from localq.tui.jobs.model_jobs import ReadyModel
    from localq.tui.jobs.thread_messages import PostingWatcher

ENDS_WITHIN_S = 1.0  # for a reply that is stopped by quitting; then its engine process is killed


class LocalqApp(ChatApp):
    """The full-screen chat.

    start    new or resumed conversation
    wanted   options for opening the model, whose name is `settings.model`
    session  an open session, instead of opening the model
    choose   finds the model to open, after the first frame; else it is `settings.model`
    pick     show the model picker first, or where `choose` finds none
    """

    CSS_PATH = Path(__file__).with_suffix(".tcss")
    TITLE = "localq"
    ENABLE_COMMAND_PALETTE = False  # its key is in `keymap`
    BINDINGS: ClassVar[list[BindingType]] = [*bindings(*keymap.EVERY_SCREEN, priority=True)]

    def __init__(
        self,
        settings: Settings,
        start: Start | None = None,
        wanted: OpenOptions | None = None,
        session: ChatSession | None = None,
        choose: Callable[[], Opening] | None = None,
        pick: bool = False,
    ) -> None:
        super().__init__(ansi_color="NO_COLOR" in os.environ)
        self.settings, self.start_with, self.wanted = settings, start or Start(), wanted
        self.use_command_palette = True
        self.model = None if session is None else ModelHandle.for_session(session)
        self._pick, self._choose = pick, choose
        self.error: LocalqError | None = None  # why no model is open
        self._opening: Job[ReadyModel] | None = None
        self._leaving: int | None = None
        self._switching = self._choosing = self._picking = False
        remember = self.start_with.store is not None and input_history.is_enabled()
        self.history = input_history.InputHistory(_history_file() if remember else None)
        self.chat = ChatScreen(self.history, self.start_with.record, empty=pick and choose is None and session is None)
        self._set(settings)

    def before_terminal_starts(self) -> None:
        """Install the signal handlers; the driver calls this before it sets the first terminal mode."""
        signals.install(self.leave, self.reset_terminal)

    async def on_mount(self) -> None:
        """Show the first screen, then open the model."""
        await self.push_screen(self.chat)
        if self.model is None and self._pick and self._choose is None:
            self.action_models()
            return
        if self.model is not None:
            self.call_later(self.use_model, self.model)
        elif (choose := self._choose) is not None:
            self.call_after_refresh(self.chat.begin, lambda: self._open_choice(choose))
        else:
            self.call_after_refresh(self.chat.begin, lambda: self.open(self.settings.model, self.wanted))
        self.call_after_refresh(self._import_the_rest)

    async def on_picker_screen_drawn(self) -> None:
        """The picker's first frame is drawn: make the chat screen behind it."""
        await self.chat.fill()
        self._import_the_rest()

    @work(exclusive=True, group="imports")
    async def _import_the_rest(self) -> None:
        await preload.import_modules()
        if not self.is_headless:
            preload.tune_garbage_collection()

    def show_failure(self, failure: LocalqError) -> None:
        """Show an unexpected error in the conversation, or over another screen."""
        if self.screen is self.chat and self.chat.is_mounted:
            self.call_later(self.chat.conversation.transcript.notice, str(failure), failed=True)
        else:
            super().show_failure(failure)

    # ---- a model

    @work(exclusive=True, group="choice")
    async def _open_choice(self, choose: Callable[[], Opening]) -> None:
        """Open the model that is chosen for this machine; show the list if there is none. What the user has picked
        meanwhile, or picks now, goes first."""
        self.chat.status(doing="choosing a model")
        self._choosing = True
        try:
            opening = await asyncio.to_thread(choose)
        except Exception as error:
            failure = error_log.unexpected("model", error)
            await self.chat.conversation.transcript.notice(str(failure), failed=True)
            opening = Opening(self.settings, self.wanted or OpenOptions())
        finally:
            self._choosing = False
        if self.model is not None or self._switching:
            return
        if self._picking:
            self.chat.status(doing=NO_MODEL)
            return
        if self._pick and opening.settings.model == self.settings.model:
            self.chat.status(doing=NO_MODEL)
            self._pick_model()
            return
        if opening.notice:
            await self.chat.conversation.transcript.notice(opening.notice)
        self.settings, self.wanted = opening.settings, opening.wanted
        self.open(self.settings.model, self.wanted)

    def open(self, name: str, wanted: OpenOptions | None) -> None:
        """Open a model in a thread; the chat screen shows progress."""
        from localq.tui.jobs.model_jobs import (  # start-up cost: they import the hub
            ReadyModel,
            open_and_load,
        )

        self.chat.status(doing=f"opening {name}", model=name)
        settings = self.settings

        def work(watcher: PostingWatcher) -> ReadyModel:
            return open_and_load(name, settings, wanted or OpenOptions(), watcher)

        self._opening = Job(name, work, self.chat.post_message, ReadyModel.close)
        self._opening.start()

    async def on_job_ended(self, message: Job.Ended) -> None:
        """Use the opened model, or show the error; another model can be chosen then."""
        job = self._opening
        if job is None or message.job is not job:
            return
        self._opening, outcome = None, job.take()
        if isinstance(outcome, ConsentError):
            self._ask(outcome)
        elif isinstance(outcome, LocalqError):
            self.error = outcome
            self.chat.status(doing=NO_MODEL)
            await self.chat.conversation.transcript.notice(str(outcome), failed=True)
        else:
            await self.use_model(ModelHandle.from_ready(outcome, self.chat.post_message))

    def _ask(self, error: ConsentError) -> None:
        """Ask about a large download; without it another model can be chosen."""
        from localq.tui.models.picker_dialogs import ConsentScreen  # start-up cost

        built_in = Settings().model if error.cost.why else ""  # where the user has named no model

        def answered(yes: bool | None) -> None:
            if yes:
                self.open(self.settings.model, replace(self.wanted or OpenOptions(), agreed=True))
            elif yes is None and built_in:
                self.settings, self.wanted = self.settings.replace(model=built_in), OpenOptions()
                self.open(built_in, self.wanted)
            else:
                self.error = error
                self.chat.status(doing=NO_MODEL)
                self.action_models()

        self.chat.status(doing=ASKING)
        self.push_screen(ConsentScreen(error.cost, built_in), answered)

    async def use_model(self, model: ModelHandle) -> None:
        """Continue the chat with `model`."""
        self.model, self.error = model, None
        self.start_with.attach(model.session)
        await self.chat.use_model(model)
        if not self.is_headless:
            preload.tune_garbage_collection()

    def on_switch_requested(self, message: SwitchRequested) -> None:
        """Switch models, for `/model NAME`."""
        if self._is_free_to_switch():
            self._switch_to(message.switch.name, message.switch.format, message.switch.draft)

    @work(exclusive=True, group="models")
    async def _switch_to(self, name: str, format: str | None, draft: str | None = None) -> None:
        await self._switch(name, self._options(format), draft)

    def _options(self, format: str | None, force: bool = False) -> OpenOptions:
        return OpenOptions(format, force, fresh=self.wanted is not None and self.wanted.fresh)

    def _is_free_to_switch(self) -> bool:
        """Return whether no other model is being opened: cancelling that would leave the conversation without one."""
        if self._switching:
            self.notify("Another model is loading; please wait.", markup=False)
        return not self._switching

    async def _switch(self, name: str, wanted: OpenOptions, draft: str | None = None) -> None:
        self._switching = True
        try:
            await self._switched(name, wanted, draft)
        finally:
            self._switching = False

    async def _switched(self, name: str, wanted: OpenOptions, draft: str | None) -> None:
        """Continue the conversation with another model, or another draft model beside it.

        The current one is unloaded first; if the other cannot be opened, the next message loads it again.
        """
        from localq.tui.models.opening_screen import OpeningScreen

        old, settings = self.model, self.settings.replace(model=name, draft=draft)
        if self._opening is not None:
            self._opening.abandon()
            self._opening = None
        if old is not None:
            record = old.session.record
            origins = without_model(old.session.origins)
            stop, unsaved = old.session.stop_strings, tuple(old.session.unsaved)
            box = old.session.tools.toolbox
            self.start_with = Start(record, old.session.store, stop, origins=origins, unsaved=unsaved, toolbox=box)
            settings = resumed_settings(record, settings, {"model": name})
            self.chat.conversation.model = None
            await asyncio.to_thread(old.close)
        else:
            self.start_with = replace(self.start_with, origins=without_model(self.start_with.origins))
        outcome = await self.push_screen_wait(OpeningScreen(name, settings, wanted))
        if not isinstance(outcome, LocalqError):
            await self.use_model(ModelHandle.from_ready(outcome, self.chat.post_message))
            return
        await self.chat.conversation.transcript.notice(str(outcome), failed=True)
        if old is not None:
            await self.chat.use_model(old)
        else:
            self.error = outcome
            self.chat.status(doing=NO_MODEL)

    # ---- leaving

    def leave(self, code: int = ExitCode.OK) -> None:
        """Exit with `code`, after stopping and saving a running reply."""
        self._leaving = code
        if self._opening is not None:
            self._opening.abandon()
        if self.chat.busy:
            self.chat.conversation.stop_job()
            self.set_timer(ENDS_WITHIN_S, self.chat.conversation.stop_job)
        else:
            self.exit(code)

    def on_conversation_jobs_free(self) -> None:
        """No job runs: exit if that is pending."""
        if self._leaving is not None:
            self.exit(self._leaving)
        else:
            preload.collect_garbage()

    def close(self) -> None:
        """End the engine process; called after `run`."""
        if self.model is not None:
            self.model.close()

    @property
    def decided(self) -> dict[str, str]:
        """Settings in force that a project's file has decided, and its path."""
        if self.model is not None:
            return self.model.session.decided
        return {name: each.source for name, each in self.start_with.origins.items()}

    async def action_quit(self) -> None:
        """Quit."""
        self.leave()

    # ---- what screens ask for

    def edit_text(self, text: str, otherwise: str) -> str:
        """Return `text` as edited in the user's editor, with the app suspended. Raises LocalqError."""
        error: LocalqError | None = None
        result = text
        try:
            with self.suspend():
                try:  # an exception inside `suspend` would leave the terminal suspended
                    result = editor.edit(text, otherwise)
                except LocalqError as failure:
                    error = failure
        except SuspendNotSupported:
            error = usage_error("editor", "cannot open an editor without a terminal", otherwise)
        if error is not None:
            raise error
        return result

    def action_palette(self) -> None:
        """Open the command palette."""
        from localq.tui.dialogs.themes import Palette  # start-up cost

        if not isinstance(self.screen, Palette):
            self.push_screen(Palette())

    def action_help(self) -> None:
        """Open or close the help."""
        from localq.tui.dialogs.help_screen import HelpScreen  # start-up cost

        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss(None)
        else:
            self.push_screen(HelpScreen(self.settings.keys))

    def action_models(self) -> None:
        """Open the model picker."""
        if self.screen is self.chat and self._is_free_to_switch():
            self._pick_model()

    @work(exclusive=True, group="models")
    async def _pick_model(self) -> None:
        from localq.tui.models.picker import PickerScreen  # start-up cost: it imports the catalogue and the planner

        self._picking = True
        try:
            picked = await self.push_screen_wait(PickerScreen(self.settings, self.decided))
            await self.chat.fill()
        finally:
            self._picking = False
        if picked is not None:
            await self._switch(picked.name, self._options(picked.format, picked.force))
        elif self.model is None and self._opening is None and not self._choosing:
            self.leave()  # there is no chat to go back to

    def action_settings(self) -> None:
        """Open the settings."""
        from localq.tui.dialogs.settings_screen import SettingsScreen  # start-up cost

        if self.screen is self.chat:
            session = None if self.model is None else self.model.session
            self.push_screen(SettingsScreen(session, self.settings, self.decided), self._set)

    def _set(self, settings: Settings | None) -> None:
        if settings is not None:
            self.settings = settings
            self.theme = settings.theme
            self.set_keymap(settings.keys)
            self.chat.show_project()

    def search_themes(self) -> None:
        """Open the list of themes; the chosen one is saved."""
        from localq.tui.dialogs.themes import ThemePalette  # start-up cost

        self.push_screen(ThemePalette())

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        """Entries of the command palette, as Textual has them."""
        from localq.tui.dialogs import palette_lines  # start-up cost: it imports the commands

        return [SystemCommand(each.title, each.text, each.run) for each in palette_lines.entries(self, screen)]


def _history_file() -> Path | None:
    try:
        return input_history.open_file()
    except OSError:
        return None
