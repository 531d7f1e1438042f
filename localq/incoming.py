"""The text of a reply as its tokens come in: put together, made harmless, thought and answer told apart, and cut at
stop strings, which count in the answer only. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from localq.sanitize import sanitize
from localq.stops import Matcher
from localq.thinking import Splitter


class Detokenizer(Protocol):
    """What is needed of `tokenizer.Detokenizer`."""

    @property
    def over(self) -> bool: ...
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Incoming:
    """Ids in, pieces out: (text, whether it is thought), none of them empty.

    thought, answer   so far
    ids               of the reply, as they came in; what is behind a stop string too
    grown             a piece was given out
    """

    def __init__(
        self, detokenizer: Detokenizer, stop_strings: Sequence[str] = (), opened: str = "", channels: bool = True
    ) -> None:
        """opened: the beginning of the reply that the prompt has (`thinking.opened`). channels: see `Splitter`."""
        self._detokenizer, self._matcher = detokenizer, Matcher(stop_strings)
        self._splitter = Splitter(opened, channels)
        self.thought = self.answer = ""
        self.ids: list[int] = []
        self.grown = False

    def begin(self, raw: str, before: Sequence[int]) -> None:
        """The reply goes on behind `raw`. before: the last ids that the model reads, `raw` among them: what new ones
        look like depends on them. A character of which only half came is whole with the next."""
        self._detokenizer.push(before)
        thought, answer = self._splitter.push(raw.rstrip("\ufffd"))
        self.thought, self.answer = thought, answer

    @property
    def raw(self) -> str:
        """The reply as it is stored; empty as long as nothing came. What is still held back is not part of it."""
        return self._splitter.head + self.answer if self.thought or self.answer else ""

    @property
    def thinking(self) -> bool:
        """Whether the thought goes on, so that there is no answer yet."""
        return self._splitter.thinking

    @property
    def closing(self) -> str:
        """What ends a thought in this reply."""
        return self._splitter.closing

    def ended(self) -> bool:
        """A stop string was met, or the answer is over: what comes is not part of the reply."""
        return self._matcher.ended() or self._detokenizer.over

    def push(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The text that is certain now."""
        self.ids += ids
        return [] if self.ended() else self._taken(sanitize(self._detokenizer.push(ids)))

    def finish(self, cut: bool = False) -> list[tuple[str, bool]]:
        """What was held back; the reply is over. cut: not by the model, so that half a character at its end is none."""
        if self._matcher.ended():
            return []
        held = sanitize(self._detokenizer.finish())
        pieces = self._taken(held.rstrip("\ufffd") if cut else held)
        thought, answer = self._splitter.finish()
        return pieces + self._kept(thought, self._matcher.finish(answer))

    def _taken(self, text: str) -> list[tuple[str, bool]]:
        thought, answer = self._splitter.push(text)
        return self._kept(thought, self._matcher.push(answer))

    def _kept(self, thought: str, answer: str) -> list[tuple[str, bool]]:
        self.thought += thought
        self.answer += answer
        self.grown = self.grown or bool(thought or answer)
        return [(text, thinks) for text, thinks in ((thought, True), (answer, False)) if text]
