"""Results of servers as text for the model: without control characters, and cut at a limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localq.sanitize import sanitize
from localq.wording import human_bytes

MOST_SUMMARY = 200  # characters


@dataclass(frozen=True)
class ToolResult:
    """Text of a result, or of an error. failed: it is an error. length: characters before the text was cut."""

    text: str
    failed: bool = False
    length: int = 0

    def limit(self, most: int) -> ToolResult:
        """At most `most` characters of it."""
        return self if len(self.text) <= most else ToolResult(self.text[:most], self.failed, len(self.text))

    def fit(self, tokens: int, count: Callable[[str], int]) -> ToolResult:
        """At most `tokens` tokens of it, as `count` counts them."""
        text = self.text
        while text and (size := count(text)) > tokens:
            text = text[: min(len(text) - 1, len(text) * tokens // size)]
        return self if text == self.text else ToolResult(text, self.failed, self.length or len(self.text))

    @property
    def is_cut(self) -> bool:
        """True if some characters are left out."""
        return self.length > len(self.text)

    @property
    def for_model(self) -> str:
        """The text, with a note where it is cut."""
        if not self.is_cut:
            return self.text
        return f"{self.text}\n[truncated: showing the first {len(self.text):,} of {self.length:,} characters]"

    @property
    def summary(self) -> str:
        """A line for the user: the error, or the size of the result."""
        if self.failed:
            words = " ".join(self.text.split())
            return words if len(words) <= MOST_SUMMARY else f"{words[:MOST_SUMMARY]}..."
        if self.is_cut:
            return f"the first {len(self.text):,} of {self.length:,} characters"
        return f"{len(self.text):,} character{'' if len(self.text) == 1 else 's'}"


def error(text: str) -> ToolResult:
    """A result that says why there is none."""
    return ToolResult(sanitize(text), failed=True)


def of_content(blocks: Sequence[Any], structured: Any, failed: bool) -> ToolResult:
    """The result of a tool: its texts; of anything else that there is such a part, as the model reads text only.

    blocks: `mcp_types.ContentBlock`s. structured: JSON value, used where no block has text
    """
    parts = [_part(each) for each in blocks]
    if structured is not None and not any(getattr(each, "type", "") == "text" for each in blocks):
        parts.append(json.dumps(structured, ensure_ascii=False))
    text = sanitize("\n".join(each for each in parts if each))
    return ToolResult(text or ("failed with no error message" if failed else "(no output)"), failed)


def _part(block: Any) -> str:
    kind = str(getattr(block, "type", ""))
    if kind == "text":
        return str(block.text)
    if kind in ("image", "audio"):
        return f"[{kind}, {block.mime_type}, {human_bytes(len(block.data) * 3 // 4)}: not readable as text]"
    if kind == "resource_link":
        return f"[resource: {block.uri}]"
    if kind == "resource":
        text = getattr(block.resource, "text", None)
        return str(text) if text is not None else f"[resource {block.resource.uri}: not readable as text]"
    return f"[{kind or 'unknown content'}]"
