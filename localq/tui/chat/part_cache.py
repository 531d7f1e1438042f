"""`PartCache`: the parts of a screen that live as long as it does, found once."""

from __future__ import annotations

from typing import TypeVar

from textual.dom import DOMNode
from textual.widget import Widget

Part = TypeVar("Part", bound=Widget)


class PartCache(DOMNode):
    """A node whose parts are asked for with every reply.

    Textual's `query_one` keeps an answer for each version of the tree below the node, up to 1,024 of each node, and
    every turn is a new version: 3 kB a reply on the chat screen.
    """

    _parts_found: dict[type[Widget], Widget]

    def part(self, kind: type[Part]) -> Part:
        """The one widget of this kind below the node. Raises `NoMatches` as `query_one` does."""
        if not hasattr(self, "_parts_found"):
            self._parts_found = {}
        found = self._parts_found.get(kind)
        if not isinstance(found, kind) or not found.is_attached:
            found = self._parts_found[kind] = self.query_one(kind)
        return found
