"""Progress of a fetch or a load as lines of text; without widgets, the caller provides the clock."""

from __future__ import annotations

from dataclasses import dataclass

from textual.content import Content

from localq.chat.terminal.transfer_rate import TransferRate
from localq.files.hub import client
from localq.tui.gauge import gauge
from localq.tui.jobs.thread_messages import Fetching, LoadingStage
from localq.wording import human_bytes

QUIET_S = 3.0  # a longer pause is shown
BAR_CELLS, PERCENT_CELLS = 60, 5


@dataclass(frozen=True)
class Lines:
    """stage: current step; share: 0 to 1, None where bytes are not counted; detail: sizes and times."""

    stage: str
    share: float | None = None
    detail: str = ""


class TransferLines:
    """Turns messages of a `PostingWatcher` into `Lines`."""

    def __init__(self) -> None:
        self._now: Fetching | LoadingStage | None = None
        self._rate = TransferRate()

    def update(self, message: Fetching | LoadingStage, now_s: float) -> None:
        """Take a message received at `now_s`."""
        if isinstance(message, Fetching) and message.total:
            self._rate.update(now_s, message.done - message.here)
        self._now = message

    def lines(self, now_s: float) -> Lines:
        """The lines at `now_s`."""
        now = self._now
        if now is None:
            return Lines("Reading files")
        share = min(now.done / now.total, 1.0) if now.total else None
        sizes = f"{human_bytes(now.done)} of {human_bytes(now.total)}" if now.total else ""
        if isinstance(now, LoadingStage):
            return Lines(f"Loading: {now.stage}", share, sizes)
        if not now.total or now.done >= now.total:
            return Lines(now.what[:1].upper() + now.what[1:], share, sizes)
        return Lines(f"Downloading {now.what}", share, self._detail(now, sizes, now_s))

    def _detail(self, now: Fetching, sizes: str, now_s: float) -> str:
        parts = [sizes]
        quiet_s = self._rate.quiet_s(now_s)
        if quiet_s >= QUIET_S:
            parts.append(f"stalled for {quiet_s:.0f} s (will retry after {client.STALL_S:.0f} s)")
        elif (rate := self._rate.bytes_per_s(now_s)) and (
            left_s := self._rate.remaining_s(now_s, now.total - now.done)
        ):
            parts += [f"{human_bytes(round(rate))}/s", f"{duration(left_s)} left"]
        here = f"\n{human_bytes(now.here)} of {human_bytes(now.total)} were already on disk" if now.here else ""
        return ", ".join(parts) + here


def duration(seconds: float) -> str:
    """A duration such as 0:07, 12:30 or 1:02:03."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar(share: float | None, cells: int = BAR_CELLS) -> Content:
    """A gauge with its share, such as "━━━━──────  40%"; empty where bytes are not counted."""
    if share is None:
        return Content()
    return Content.assemble(*gauge(share, cells, "$primary"), (f" {share:4.0%}", "bold"))
