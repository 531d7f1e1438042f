"""What a full screen shows, cell by cell."""

from __future__ import annotations

from textual.app import App


def cells(app: App) -> list[list[tuple[object, ...]]]:
    """Of each cell of the screen what is seen: its character, and its colours and style where they show."""
    return [
        [_cell(character, segment.style) for segment in strip for character in segment.text]
        for strip in app.screen._compositor.render_strips()
    ]


def _cell(character, style):
    behind = style.bgcolor
    return (character, behind, *((style.color, style.bold, style.italic, style.strike) if character.strip() else ()))
