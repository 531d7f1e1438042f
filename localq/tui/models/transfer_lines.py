"""How far a fetch or a load is, as the lines that a screen shows. Knows no widget; the clock is the caller's."""

from __future__ import annotations

from dataclasses import dataclass

from localq.chat.terminal.transfer_rate import TransferRate
from localq.files.hub import client as hub_client
from localq.tui.jobs.thread_messages import Fetching, LoadingStage
from localq.wording import human_bytes

QUIET_S = 3.0  # a transfer that stands still for longer is said to
BAR_CELLS = 24


@dataclass(frozen=True)
class Lines:
    """stage: what is done; share: of the bytes, 0 to 1, None where they are not counted; detail: sizes and times."""

    stage: str
    share: float | None = None
    detail: str = ""


class TransferLines:
    """Fed with the messages of a `PostingWatcher`; `lines` says how things stand."""

    def __init__(self) -> None:
        self._now: Fetching | LoadingStage | None = None
        self._rate = TransferRate()

    def seen(self, message: Fetching | LoadingStage, now_s: float) -> None:
        """A message that came at `now_s`."""
        if isinstance(message, Fetching) and message.total:
            self._rate.update(now_s, message.done - message.here)
        self._now = message

    def lines(self, now_s: float) -> Lines:
        """As it stands at `now_s`."""
        now = self._now
        if now is None:
            return Lines("Looking at its files")
        share = min(now.done / now.total, 1.0) if now.total else None
        sizes = f"{human_bytes(now.done)} of {human_bytes(now.total)}" if now.total else ""
        if isinstance(now, LoadingStage):
            return Lines(f"Loading: {now.stage}", share, sizes)
        if not now.total or now.done >= now.total:
            return Lines(now.what[:1].upper() + now.what[1:], share, sizes)
        return Lines(f"Fetching {now.what}", share, self._detail(now, sizes, now_s))

    def _detail(self, now: Fetching, sizes: str, now_s: float) -> str:
        told = [sizes]
        quiet_s = self._rate.quiet_s(now_s)
        if quiet_s >= QUIET_S:
            told.append(f"nothing has come for {quiet_s:.0f} s; tried again after {hub_client.STALL_S:.0f} s")
        elif (rate := self._rate.bytes_per_s(now_s)) and (left_s := self._rate.left_s(now_s, now.total - now.done)):
            told += [f"{human_bytes(round(rate))}/s", f"{duration(left_s)} left"]
        here = f"\n{human_bytes(now.here)} of {human_bytes(now.total)} were here already" if now.here else ""
        return ", ".join(told) + here


def duration(seconds: float) -> str:
    """0:07, 12:30, 1:02:03"""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def bar(share: float | None, cells: int = BAR_CELLS) -> str:
    """A bar that needs no colour: "####------  40 %"; empty where nothing is counted."""
    if share is None:
        return ""
    full = int(share * cells)
    return f"{'#' * full}{'-' * (cells - full)} {share:4.0%}"
