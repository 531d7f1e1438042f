"""Details of one model beside the list: what it needs and gives here, and the other models of its family."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from textual.content import Content

from localq.sanitize import sanitize
from localq.tui.gauge import MUTED, Part, gauge, rising
from localq.tui.models.picker_rows import COLOURS, PickerRow, fold
from localq.wording import human_bytes

LABEL = 10  # cells
MOST_RELATIVES = 12
_FAIR, _BAD = 0.9, 1.0  # of the memory that there is


def card(row: PickerRow, basis: str, rows: Sequence[PickerRow], width: int) -> Content:
    """All lines about `row`. basis: of the speeds; rows: all of the list, for its relatives."""
    lines = [Content.styled(sanitize(row.name), "bold $text-accent"), _verdict(row), Content(), *_figures(row, width)]
    for text in (row.place, *row.why.split("; ")):
        if text:
            lines.append(Content(f"· {sanitize(text[:1].upper() + text[1:])}"))
    if row.tok_s is not None and basis:
        lines.append(Content.styled(f"· Speeds are {sanitize(basis)}", MUTED))
    return Content("\n").join([*lines, *_relatives(row, rows, width)])


def _verdict(row: PickerRow) -> Content:
    year = f", {row.year}" if row.year else ""
    return Content.assemble((row.verdict, f"bold {COLOURS.get(row.verdict, '')}".strip()), f" · {row.format}{year}")


def _figures(row: PickerRow, width: int) -> list[Content]:
    found = []
    if row.needs is not None and row.share is not None:
        cells = max(4, width - LABEL - 20)
        drawn = gauge(row.share, cells, rising(row.share, _FAIR, _BAD))
        found.append(_line("memory", *drawn, f" {human_bytes(row.needs)}, {row.share:.0%}"))
    if row.ctx is not None:
        found.append(_line("context", (f"{row.ctx:,}", "bold"), " tokens at most"))
    if row.tok_s is not None:
        full = f", {row.tok_s_full:.0f} when the context is full" if row.tok_s_full is not None else ""
        found.append(_line("speed", (f"{row.tok_s:.0f} tok/s", "bold"), full))
    if row.score != "-":
        found.append(_line("score", (row.score, "bold"), ", expected" if row.score.startswith("~") else ""))
    return [*found, Content()] if found else []


def _line(label: str, *parts: str | Part) -> Content:
    return Content.assemble((f"{label:<{LABEL}}", MUTED), *parts)


def _relatives(row: PickerRow, rows: Iterable[PickerRow], width: int) -> list[Content]:
    """Other models of the family, each in its best format, in the order of the list."""
    of_family = [each for each in rows if each.family == row.family and each.model != row.model]
    others = fold(of_family, lambda each: each.model)
    if not others:
        return []
    name_cells = max(len(each.name) for each in others[:MOST_RELATIVES])
    found = [Content(), Content.styled(f"Also in this family: {len(others)}", "bold")]
    for each in others[:MOST_RELATIVES]:
        speed = f"{each.tok_s:5.0f} tok/s" if each.tok_s is not None else ""
        text = f"{sanitize(each.name):<{name_cells}}  "
        style = COLOURS.get(each.verdict, "")
        found.append(Content.assemble(text, (each.verdict, style), f"  {speed}").truncate(width, ellipsis=True))
    return found
