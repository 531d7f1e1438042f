"""The status line: phase, context, speed, model. A narrow line drops the least important parts."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from textual.content import Content
from textual.reactive import reactive
from textual.widgets import Static

from localq.sanitize import sanitize
from localq.stats import Stats
from localq.wording import human_bytes

BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"


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


def phase(status: Status) -> str:
    """The current phase in words."""
    stats = status.stats
    if status.stopping:
        return "stopping"
    if status.doing or stats is None:
        return status.doing
    if stats.phase == "prefill":
        done = stats.cached_tokens + stats.prefilled_tokens
        return f"reading the prompt {done / stats.prompt_tokens:.0%}" if stats.prompt_tokens else "reading the prompt"
    return "thinking" if status.thinking else "answering"


def transfer_text(what: str, done: int, total: int) -> str:
    """Progress such as "reading weights 35% of 98.4 MB"; without a share where bytes are not counted."""
    return f"{what} {done / total:.0%} of {human_bytes(total)}" if total else what


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A bar: `share` (0 to 1) of `cells` cells, in eighths."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(cells, "░")


def line(status: Status, width: int) -> str:
    """The line in at most `width` cells; parts of the lowest rank are dropped."""
    parts = [(rank, text) for rank, text in _parts(status) if text]
    while parts and cell_len(_join(parts)) > width:
        if len(parts) == 1:
            return set_cell_size(parts[0][1], max(width, 0))
        parts.remove(min(parts, key=lambda part: part[0]))
    return _join(parts)


def _join(parts: list[tuple[int, str]]) -> str:
    return " │ ".join(text for _, text in parts)


def _parts(status: Status) -> list[tuple[int, str]]:
    """Parts as (rank, text), in the order of the line."""
    stats = status.stats
    parts = [(9, phase(status))]
    if stats is not None:
        fill = f"{stats.context_fill:.0%}"
        parts.append((7, f"context {fill}" if stats.context_size else ""))
        parts.append((4, bar(stats.context_fill) if stats.context_size else ""))
        parts.append((8, f"{stats.tokens_per_s:.1f} tok/s" if stats.tokens_per_s else ""))
        first_s = stats.time_to_first_token_s
        parts.append((5, f"first token {first_s:.2f} s" if first_s else ""))
    parts.append((6, sanitize(status.model).replace("\n", " ")))
    parts.append((3, status.format))
    parts.append((2, sanitize(status.device)))
    parts.append((1, status.hint))
    return parts


class StatusLine(Static):
    """Draws a `Status` in one row."""

    status: reactive[Status] = reactive(Status())

    def __init__(self, id: str | None = None, hint: str = "") -> None:
        super().__init__(id=id)
        self.set_reactive(StatusLine.status, Status(hint=hint))

    def render(self) -> Content:
        """The line for the current width."""
        return Content(line(self.status, self.size.width))
