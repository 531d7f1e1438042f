"""The instrument panel: speed, memory, card, kernel times.

New data is only noted; drawing follows at most `FRAMES` times a second, while the panel is visible and no screen is
above it (a change behind a dialog redraws the whole screen). Sensors are read at most once a second, in a thread, and
not while no panel is visible. The panel takes no profile: it posts `ProfileRequested`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.reactive import reactive
from textual.screen import ModalScreen
from textual.timer import Timer

from localq.gpus import Reading
from localq.stats import Stats
from localq.tui.instruments.card_line import CardLine
from localq.tui.instruments.instrument_facts import LOOK_S, InstrumentFacts
from localq.tui.instruments.instrument_widget import NO_SOURCE, Instrument
from localq.tui.instruments.kernel_bars import KernelBars
from localq.tui.instruments.memory_bar import MemoryBar
from localq.tui.instruments.speed_graph import SpeedGraph
from localq.tui.key_line import KeyLine
from localq.tui.keys import bindings
from localq.tui.terminal.terminal_app import TerminalScreen

if TYPE_CHECKING:
    from localq.worker.messages import Loaded

FRAMES = 8  # a second, at most
TWO_COLUMNS = 74  # cells from which the full screen has two columns
Mode = Literal["side", "strip", "full"]
MODES: tuple[Mode, ...] = ("side", "strip", "full")


class InstrumentPanel(VerticalScroll):
    """All instruments. mode: "side", "strip" (speed and memory in six lines, and a blank one above) or "full"."""

    DEFAULT_CSS = Path(__file__).with_suffix(".tcss").read_text(encoding="utf-8")
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("instruments_profile")]

    class ProfileRequested(Message):
        """A profile is due; answer with `show_profile` or `show_no_profile` when no reply runs."""

    class Sensed(Message):
        """A reading of the sensors (or of host memory) for the load `loaded`."""

        def __init__(self, loaded: Loaded, reading: Reading) -> None:
            super().__init__()
            self.loaded, self.reading = loaded, reading

    mode: reactive[Mode] = reactive[Mode]("side", init=False)

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        facts: InstrumentFacts | None = None,
        id: str | None = None,
        mode: Mode = "side",
    ) -> None:
        """facts: data shared with another panel."""
        super().__init__(id=id, classes=f"-narrow -{mode}")
        self.set_reactive(InstrumentPanel.mode, mode)
        self.facts = facts or InstrumentFacts(clock)
        self._seen = self._drawing = False
        self._ticks: Timer | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="instruments--column -main"):
            yield SpeedGraph(self.facts, "speed")
            yield MemoryBar(self.facts, "memory")
        with Vertical(classes="instruments--column -more"):
            yield CardLine(self.facts, "card")
            yield KernelBars(self.facts, "kernels")

    # ---- input

    def show_model(self, loaded: Loaded, limit: int | None = None) -> None:
        """A model was loaded. limit: bytes of `--vram`."""
        self.facts.load(loaded, limit)
        self._look()
        self._ask()

    def show_stats(self, stats: Stats) -> None:
        """Add a stream event of the reply; cheap."""
        self.facts.add(stats)

    def end_reply(self) -> None:
        """The reply has ended."""
        self.facts.end()
        self._ask()

    def show_profile(self, profile: dict[str, Any]) -> None:
        """Show a profile (`StepProfile.to_dict()`)."""
        self.facts.add_profile(profile)

    def show_no_profile(self, why: str) -> None:
        """Record a failed profile; it is tried again after later replies, `TRIES` times in all."""
        self.facts.add_profile_failure(why)

    def action_profile(self) -> None:
        """Request a profile, now or after the running reply."""
        self.facts.wanted = self.facts.on_gpu
        self._ask()

    # ---- visibility

    @property
    def is_visible(self) -> bool:
        """True if the panel is visible: on a screen that no opaque screen covers."""
        if not self._seen or not self.is_attached:
            return False
        screens = self.app.screen_stack
        above = screens[screens.index(self.screen) + 1 :] if self.screen in screens else screens
        return all(each.styles.background.a < 1 for each in above)

    def on_mount(self) -> None:
        self.facts.changed.add(self._changed)
        self._ticks = self.set_interval(LOOK_S, self._tick, pause=True)
        self.watch_mode()

    def on_unmount(self) -> None:
        self.facts.changed.discard(self._changed)

    def on_show(self) -> None:
        self._seen = True
        if self._ticks is not None:
            self._ticks.resume()
        self._tick()

    def on_hide(self) -> None:
        self._seen = False
        if self._ticks is not None:
            self._ticks.pause()

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < TWO_COLUMNS, "-narrow")
        self._changed()

    def watch_mode(self) -> None:
        """Set the CSS class of the mode."""
        self.update_classes({f"-{each}": self.mode == each for each in MODES})
        for instrument in self.query(Instrument):
            instrument.compact = self.mode == "strip"
            instrument.refresh(layout=True)
        self._ask()

    # ---- drawing and reading

    def _changed(self) -> None:
        if not self._drawing and self.is_visible and self.screen.is_active:
            self._drawing = True
            self.set_timer(1 / FRAMES, self._draw)

    def _draw(self) -> None:
        self._drawing = False
        if self.is_visible and self.screen.is_active:
            self._fit()
            for instrument in self.query(Instrument):
                if instrument.display:
                    instrument.redraw()

    def _fit(self) -> None:
        """Drop rows where the panel would overflow without: as few as possible, and none if it overflows all the same
        and has to be scrolled."""
        shown = [each for each in self.query(Instrument) if each.display]
        for dropped in (*range(NO_SOURCE + 1), 0):
            for each in shown:
                each.dropped = dropped
            if self.mode == "strip" or self._rows() <= self.size.height:
                return

    def _rows(self) -> int:
        """Rows that the instruments take, with a blank one between them."""
        heights = []
        for column in self.query(".instruments--column"):
            lines = [len(each.lines(each.content_size.width)) for each in column.query(Instrument)]
            heights.append(sum(count + 1 for count in lines if count))
        is_beside = self.mode == "full" and not self.has_class("-narrow")
        return (max(heights) if is_beside else sum(heights)) - 1

    def _tick(self) -> None:
        self._changed()  # the ages change
        self._look()
        if not self.facts.untimed:  # a failed profile is tried again after the next reply
            self._ask()

    def _ask(self) -> None:
        """Request a profile, if one is due and visible."""
        if self.is_visible and self.mode != "strip" and self.facts.profile_due:
            self.facts.asked, self.facts.wanted = True, False
            self.post_message(self.ProfileRequested())

    def _look(self) -> None:
        """Read the sensors in a daemon thread: a faulty driver may never answer."""
        facts = self.facts
        if facts.look is None or facts.looking or not self.is_visible:
            return
        if facts.clock() - facts.looked_s >= 0.9 * LOOK_S:  # timers are not exact
            facts.looking, facts.looked_s = True, facts.clock()
            threading.Thread(target=self._sense, args=(facts.loaded, facts.look), daemon=True).start()

    def _sense(self, loaded: Loaded, look: Callable[[], Reading]) -> None:
        try:
            reading = look()
        finally:
            self.facts.looking = False
        self.post_message(self.Sensed(loaded, reading))

    def on_instrument_panel_sensed(self, message: Sensed) -> None:
        """Use a reading, unless another model was loaded meanwhile."""
        message.stop()
        if message.loaded is self.facts.loaded:
            self.facts.add_reading(message.reading)


class InstrumentsScreen(TerminalScreen, ModalScreen[None]):
    """All instruments on the whole screen, for narrow terminals."""

    DEFAULT_CSS = "InstrumentsScreen { background: $background; }"
    BINDINGS: ClassVar[list[BindingType]] = [*bindings("instruments", "profile", "instruments_leave")]

    def __init__(self, panel: InstrumentPanel) -> None:
        """Shows the data of `panel`; profile requests go through it."""
        super().__init__()
        self._panel = panel

    def compose(self) -> ComposeResult:
        yield InstrumentPanel(facts=self._panel.facts, mode="full")
        yield KeyLine("instruments_leave", "profile", "help", profile="time the kernels")

    def action_instruments(self) -> None:
        """Back to the chat."""
        self.dismiss()

    def action_leave(self) -> None:
        """Close."""
        self.dismiss()

    def action_profile(self) -> None:
        """Request a profile, now or after the running reply."""
        self.query_one(InstrumentPanel).action_profile()

    def on_instrument_panel_profile_requested(self, message: InstrumentPanel.ProfileRequested) -> None:
        """Forward the request to the chat screen."""
        message.stop()
        self._panel.post_message(InstrumentPanel.ProfileRequested())
