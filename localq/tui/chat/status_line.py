"""The status line: phase and model at the left, context and speed at the right.

A narrow line drops the least important parts. While something runs, a spinner and the seconds since its start are
beside the phase; at rest nothing is drawn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from textual.content import Content
from textual.reactive import reactive
from textual.timer import Timer
from textual.widgets import Static

from localq.sanitize import sanitize
from localq.stats import Stats
from localq.tui.gauge import gauge, rising
from localq.tui.instruments.card_line import short_device
from localq.wording import human_bytes

BAR_CELLS = 10
FAIR, BAD = 0.75, 0.9  # context in use from which the gauge is a warning, and an error
READY, NO_MODEL, SENDING, WORKING = "ready", "no model", "sending", "working"
ASKING = "waiting for your answer"
AT_REST = ("", READY, NO_MODEL, ASKING)  # phases without a spinner
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TICK_S = 0.1  # between two frames of the spinner
LEAST_S = 1.0  # seconds from which the time is shown
GAP = 2  # cells between the two sides, at least
_SEPARATOR = Content.styled(" │ ", "$foreground 30%")
_BADGES = {READY: "$text-success on $success-muted", NO_MODEL: "$text-error on $error-muted"}


@dataclass(frozen=True)
class Status:
    """Content of the status line.

    doing  state outside a reply, such as "loading" or "ready"; empty while a reply runs
    stats  of the running or last reply; None: no reply yet
    thinking, stopping   of the running reply
    model, format, device   empty until known
    hint   shown if there is room
    """

    doing: str = ""
    stats: Stats | None = None
    thinking: bool = False
    stopping: bool = False
    model: str = ""
    format: str = ""
    device: str = ""
    hint: str = ""

    @property
    def is_working(self) -> bool:
        """True while something runs that the user waits for."""
        return phase(self) not in AT_REST


def phase(status: Status) -> str:
    """The current phase in words."""
    stats = status.stats
    if status.stopping:
        return "stopping"
    if status.doing or stats is None:
        return status.doing
    if stats.phase == "prefill":
        done = stats.cached_tokens + stats.prefilled_tokens
        return (
            f"processing the prompt {done / stats.prompt_tokens:.0%}"
            if stats.prompt_tokens
            else "processing the prompt"
        )
    return "thinking" if status.thinking else "answering"


def transfer_text(what: str, done: int, total: int) -> str:
    """Progress such as "loading weights 35% of 98.4 MB"; without a share where bytes are not counted."""
    return f"{what} {done / total:.0%} of {human_bytes(total)}" if total else what


def short_name(model: str) -> str:
    """The name of a model without its folder and format."""
    return sanitize(Path(model).name.partition("@")[0]).replace("\n", " ")


def line(status: Status, width: int, busy: str = "") -> Content:
    """The line in at most `width` cells; parts of the lowest rank are dropped. busy: spinner and time."""
    left, right = _parts(status, busy)
    while _cells(left) + _cells(right) + (GAP if right else 0) > width:
        if len(left) + len(right) == 1:
            return Content(left[0][1].plain).truncate(max(width, 0), ellipsis=False) if left else Content("")
        side = min((each for each in (left, right) if each), key=lambda parts: min(rank for rank, _ in parts))
        side.remove(min(side, key=lambda part: part[0]))
    gap = " " * (width - _cells(left) - _cells(right))
    return Content.assemble(_join(left), gap if right else "", _join(right))


def _join(parts: list[tuple[int, Content]]) -> Content:
    return _SEPARATOR.join(text for _, text in parts)


def _cells(parts: list[tuple[int, Content]]) -> int:
    return sum(text.cell_length for _, text in parts) + 3 * max(0, len(parts) - 1)


def _parts(status: Status, busy: str) -> tuple[list[tuple[int, Content]], list[tuple[int, Content]]]:
    """Parts of the left and of the right side as (rank, text), in their order."""
    stats, name = status.stats, phase(status)
    badge = Content.styled(f" {name}{busy} ", _BADGES.get(name, "$text-primary on $primary-muted"))
    state = [(9, badge)] if name else []
    about = [(6, short_name(status.model)), (3, status.format), (2, short_device(status.device)), (1, status.hint)]
    left = state + [(rank, Content(text)) for rank, text in about if text]
    right: list[tuple[int, Content]] = []
    if stats is not None and stats.context_size:
        style = rising(stats.context_fill, FAIR, BAD)
        right.append((7, Content.assemble("context ", (f"{stats.context_fill:.0%}", f"bold {style}"))))
        right.append((4, Content.assemble(*gauge(stats.context_fill, BAR_CELLS, style))))
    if stats is not None and stats.tokens_per_s:
        right.append((8, Content.styled(f"{stats.tokens_per_s:.1f} tok/s", "bold")))
    if stats is not None and stats.drafted:
        right.append((3, Content(f"{stats.tokens_per_step:.1f} tokens per step")))
    if stats is not None and stats.time_to_first_token_s:
        right.append((5, Content(f"first token {stats.time_to_first_token_s:.2f} s")))
    return left, right


class StatusLine(Static):
    """Draws a `Status` in one row. on_tick: called with phase, spinner and time whenever they change."""

    status: reactive[Status] = reactive(Status())

    def __init__(
        self, id: str | None = None, hint: str = "", on_tick: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(id=id)
        self.set_reactive(StatusLine.status, Status(hint=hint))
        self._on_tick = on_tick
        self._frames, self._frame = itertools.cycle(SPINNER), SPINNER[0]
        self._since_s = 0.0  # monotonic: since when it works
        self._ticks: Timer | None = None

    def on_mount(self) -> None:
        """Prepare the spinner."""
        self._ticks = self.set_interval(TICK_S, self._tick, pause=not self.status.is_working)

    def watch_status(self, before: Status, after: Status) -> None:
        """Start and stop the spinner."""
        if after.is_working and not before.is_working:
            self._since_s = time.monotonic()
            if self._ticks is not None:
                self._ticks.resume()
        elif before.is_working and not after.is_working and self._ticks is not None:
            self._ticks.pause()
        self._on_tick(self.text)

    def _tick(self) -> None:
        self._frame = next(self._frames)
        self.refresh()
        self._on_tick(self.text)

    @property
    def _busy(self) -> str:
        if not self.status.is_working:
            return ""
        seconds = time.monotonic() - self._since_s
        return f" {self._frame}" + (f" {seconds:.0f} s" if seconds >= LEAST_S else "")

    @property
    def text(self) -> str:
        """Phase, spinner and time."""
        return f"{phase(self.status)}{self._busy}"

    def render(self) -> Content:
        """The line for the current width."""
        return line(self.status, self.content_size.width, self._busy)
