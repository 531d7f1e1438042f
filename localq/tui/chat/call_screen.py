"""The question before a tool call: once, for this session, no, never; Ctrl-C stops the reply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from localq.chat.tools.permissions import Decision, Question
from localq.sanitize import sanitize
from localq.tui.chat.turn_view import truncate
from localq.tui.keys import active_key, bindings
from localq.tui.terminal.terminal_app import TerminalScreen

_CSS = (Path(__file__).parents[1] / "models" / "picker_dialogs.tcss", Path(__file__).with_suffix(".tcss"))


class CallScreen(TerminalScreen, ModalScreen[None]):
    """Shows a call with all of its arguments; "no" has the focus. It closes when the question is answered anywhere."""

    CSS_PATH = [*_CSS]  # noqa: RUF012 - as its base has it
    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar = [
        *bindings("question_yes", "question_session", "question_no", "question_never", "question_stop")
    ]

    class Answered(Message):
        """The question has an answer."""

    def __init__(self, question: Question, stop: Callable[[], object]) -> None:
        """stop: stops the reply, which answers the question."""
        super().__init__()
        self._question, self._stop = question, stop

    def compose(self) -> ComposeResult:
        """The call and the answers."""
        tool = self._question.tool
        with Vertical(classes="dialog"):
            yield Static(Content(sanitize(f"Call {tool.label} from {tool.server}?")), classes="question")
            with VerticalScroll(id="arguments"):
                yield Static(Content("\n".join(truncate(sanitize(line)) for line in self._question.argument_lines)))
            with Horizontal(classes="buttons"):
                yield Button(f"No ({active_key(self, 'question_no')})", id="no", compact=True)
                yield Button(f"Once ({active_key(self, 'question_yes')})", id="yes", compact=True)
                yield Button(f"This session ({active_key(self, 'question_session')})", id="session", compact=True)
                yield Button(f"Never ({active_key(self, 'question_never')})", id="never", compact=True)

    def on_mount(self) -> None:
        """Close with the first answer, which may come from another thread."""
        self._question.on_answer(lambda: self.post_message(self.Answered()))

    def on_unmount(self) -> None:
        """The app ends: the thread that waits goes on."""
        self._question.answer(Decision.STOP)

    @on(Answered)
    def _close(self) -> None:
        if self.is_current:
            self.dismiss(None)
        elif self in self.app.screen_stack:  # another screen is above it
            self.call_later(self.post_message, self.Answered())

    @on(Button.Pressed)
    def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        answers = {"yes": Decision.ONCE, "session": Decision.SESSION, "never": Decision.NEVER}
        self._question.answer(answers.get(message.button.id or "", Decision.REFUSE))

    def action_yes(self) -> None:
        """Allow this call."""
        self._question.answer(Decision.ONCE)

    def action_session(self) -> None:
        """Allow calls of this tool."""
        self._question.answer(Decision.SESSION)

    def action_no(self) -> None:
        """Refuse this call."""
        self._question.answer(Decision.REFUSE)

    def action_never(self) -> None:
        """Refuse calls of this tool."""
        self._question.answer(Decision.NEVER)

    def action_stop(self) -> None:
        """Stop the reply."""
        self._stop()
