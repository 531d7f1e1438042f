"""The settings screen: groups of fields in one or two columns; applied together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.containers import Container, Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, Select, Static, TextArea

from localq import places, settings
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.sampling import LIMITS, STATED, Sampling
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.tui.dialogs import settings_form
from localq.tui.dialogs.settings_form import CHOICES, LINES, NAMES, Form
from localq.tui.keys import active_key, bindings
from localq.tui.terminal.terminal_app import TerminalScreen

_STOP_HELP = "stop strings, one per line; write \\n for a newline"
COLUMNS = (("Sampling", "DRY: repetition", "XTC: variety"), ("Reply", "Screen"))
GROUPS = {
    "Sampling": ("temperature", "top_k", "top_p", "min_p", "repeat_penalty"),
    "DRY: repetition": ("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    "XTC: variety": ("xtc_probability", "xtc_threshold"),
    "Reply": ("seed", "max_tokens", "think_budget", "stop", "system"),
    "Screen": ("theme", "ui"),
}
TWO_COLUMNS = 100  # cells from which there are two


class SettingsScreen(TerminalScreen, ModalScreen["Settings | None"]):
    """Settings of `session`, if any. Dismisses with the new settings; None: unchanged.

    decided   settings that a project's file has decided, and its path; they are not saved to config.toml
    """

    CSS_PATH = Path(__file__).with_suffix(".tcss")
    BINDINGS: ClassVar = [*bindings("settings_apply", "settings_keep", "settings_leave")]
    HORIZONTAL_BREAKPOINTS = [(0, "-one"), (TWO_COLUMNS, "-two")]  # noqa: RUF012 - as its base has it

    def __init__(
        self, session: ChatSession | None, settings: Settings, decided: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._session, self._settings = session, settings
        self._decided = dict(decided or {})
        self._changed = False

    def compose(self) -> ComposeResult:
        self._defaults = settings_form.own_defaults(self._session)
        texts = settings_form.field_texts(self._session, self._settings, self._defaults)
        self._first_texts = {name: sanitize(text) for name, text in texts.items()}
        with Vertical(id="panel") as panel:
            panel.border_title = "Settings"
            with VerticalScroll(id="fields", can_focus=False), Container(id="columns"):
                for groups in COLUMNS:
                    with Vertical(classes="column"):
                        for group in groups:
                            yield Static(group, markup=False, classes="group")
                            for name in GROUPS[group]:
                                yield from self._rows(name, self._first_texts[name])
            yield Static(self._about(NAMES[0]), id="about", markup=False)
            yield Static("", id="notice", markup=False)
            with Horizontal(id="buttons"):
                yield Button(f"Apply {active_key(self, 'settings_apply')}", id="apply", compact=True)
                yield Button(f"Save {active_key(self, 'settings_keep')}", id="keep", compact=True)
                yield Button(f"Back {active_key(self, 'settings_leave')}", id="leave", compact=True)

    def _rows(self, name: str, text: str) -> Iterator[Widget]:
        """A field beside its name, and the line of its error."""
        heading = Static(name, markup=False, id=f"heading-{name}", classes="heading")
        yield Horizontal(heading, _field(name, text, _own(name, self._defaults)), classes="row")
        yield _Wrong("", id=f"wrong-{name}", markup=False, classes="wrong")

    def on_mount(self) -> None:
        """Show errors of the initial values."""
        self._show(settings_form.read(self._written(), self._defaults))
        self.query_one("#temperature").focus()

    # ---- scrolling

    def set_focus(self, widget: Widget | None, scroll_visible: bool = True, from_app_focus: bool = False) -> None:
        """As Textual's, but scroll to the field with its heading and error."""
        super().set_focus(widget, False, from_app_focus)
        if scroll_visible:
            self.call_after_refresh(self.reveal)

    def reveal(self) -> None:
        """Scroll to the focused field; last, so that it is visible where its heading and error do not fit."""
        name = self.focused.id if self.focused is not None else None
        if name not in NAMES or not self.query("#fields"):  # none while the screen is closing
            return
        for about in self.query("#about").results(Static):
            about.update(self._about(name))
        fields = self.query_one("#fields")
        for each in (f"wrong-{name}", f"heading-{name}", name):
            for widget in self.query(f"#{each}").results(Widget):
                if widget.display:
                    fields.scroll_to_widget(widget, animate=False, immediate=True)

    # ---- what is written

    def _about(self, name: str) -> str:
        about = _about(name, self._defaults)
        return sanitize(f"{about}; set by {self._decided[name]}") if name in self._foreign() else about

    def _foreign(self) -> set[str]:
        """Fields that still have what a project's file has decided."""
        written = self._written() if self.is_mounted else self._first_texts
        return {name for name in self._decided if name in NAMES and written[name] == self._first_texts[name]}

    def _written(self) -> dict[str, str]:
        return {name: _text(self.query_one(f"#{name}")) for name in NAMES}

    def _show(self, form: Form) -> None:
        for name in NAMES:
            wrong, error = self.query_one(f"#wrong-{name}", Static), form.errors.get(name)
            wrong.display = error is not None
            wrong.update(sanitize(f"! {error.why}. {error.next_step}") if error is not None else "")

    @on(Input.Changed)
    @on(TextArea.Changed)
    def _edited(self, message: Input.Changed | TextArea.Changed) -> None:
        message.stop()
        self._show(settings_form.read(self._written(), self._defaults))

    # ---- what the user does

    @on(Button.Pressed)
    async def _pressed(self, message: Button.Pressed) -> None:
        message.stop()
        await self.run_action(message.button.id or "")

    @on(Input.Submitted)
    def action_apply(self) -> None:
        """Apply and close, or focus the first invalid field."""
        if self._applied():
            self.dismiss(self._settings)

    def action_keep(self) -> None:
        """Apply, and save to config.toml."""
        if not self._applied():
            return
        foreign = self._foreign()
        try:
            changed = settings_form.save_as_default(self._written(), foreign)
            known = settings.read_config()
        except LocalqError as error:
            self._tell(str(error))
            return
        now: dict[str, Any] = {name: known.get(name) for name in changed}
        self._settings = dataclasses.replace(self._settings, **now)
        others = f"; not saved: {', '.join(sorted(foreign))} (set by {places.PROJECT_FILE})" if foreign else ""
        saved = f"Saved {', '.join(changed)} to {places.config_file()}" if changed else "No changes to save"
        self._tell(saved + others)

    def action_leave(self) -> None:
        """Close, discarding changes."""
        self.dismiss(self._settings if self._changed else None)

    def _applied(self) -> bool:
        written = self._written()
        form = settings_form.read(written, self._defaults)
        self._show(form)
        if form.errors:
            first = next(name for name in NAMES if name in form.errors)
            self._tell(f"Not applied: {first} is invalid")
            self.query_one(f"#{first}").focus()
            return False
        if self._session is not None and (note := settings_form.apply(form, self._session)):
            self.app.notify(sanitize(note), markup=False)
        self._settings = self._settings.replace(theme=written["theme"], ui=written["ui"])
        self.app.theme, self._changed = self._settings.theme, True
        return True

    def _tell(self, text: str) -> None:
        self.query_one("#notice", Static).update(sanitize(text))


class _Wrong(Static):
    def on_resize(self) -> None:  # laid out only now
        for each in self.ancestors:
            if isinstance(each, SettingsScreen):
                each.reveal()


def _about(name: str, defaults: Sampling) -> str:
    """Name, range, description and the model's default."""
    if name == "stop":
        return f"stop: {_STOP_HELP}"
    parts = [settings.DESCRIPTIONS[name]]
    if name in LIMITS:
        parts = [LIMITS[name][1], *parts, *([f"model default: {own}"] if (own := _own(name, defaults)) else [])]
    return f"{name}: {'; '.join(parts)}"


def _own(name: str, defaults: Sampling) -> str:
    """The model's default; empty for settings that generation_config.json cannot state."""
    return str(getattr(defaults, name)) if name in STATED else ""


def _field(name: str, text: str, own: str) -> Widget:
    if name in LINES:
        return Input(text, id=name, compact=True, placeholder=f"default: {own}" if own else "unset")
    if name in CHOICES:
        choices: Iterator[tuple[str, str]] = ((each, each) for each in settings.CHOICES[name])
        return Select(choices, value=text, allow_blank=False, id=name, compact=True)
    return TextArea(text, id=name, compact=True, tab_behavior="focus")


def _text(field: Widget) -> str:
    if isinstance(field, TextArea):
        return field.text
    if isinstance(field, Select):
        return str(field.value)
    assert isinstance(field, Input)
    return field.value
