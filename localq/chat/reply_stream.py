"""One reply as it comes from the engine: its events become pieces of text, and an end with what is to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from localq.chat.reply import Replies, Reply, ReplyPiece, notices
from localq.chat.stop_strings import Matcher
from localq.sanitize import sanitize
from localq.text import harmony, thinking
from localq.text.grammar import matches
from localq.text.thinking import ThoughtSplitter
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens

if TYPE_CHECKING:
    from localq.text.tokenizer import Tokenizer


class Detokenizer(Protocol):
    """What is needed of `tokenizer.Detokenizer`."""

    @property
    def over(self) -> bool: ...
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class ReplyDecoder:
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
        self._splitter = ThoughtSplitter(opened, channels)
        self.thought = self.answer = ""
        self.ids: list[int] = []
        self.grown = False

    def start_with(self, raw: str, before: Sequence[int]) -> None:
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

    def is_over(self) -> bool:
        """A stop string was met, or the answer is over: what comes is not part of the reply."""
        return self._matcher.has_matched() or self._detokenizer.over

    def push(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """The text that is certain now."""
        self.ids += ids
        return [] if self.is_over() else self._taken(sanitize(self._detokenizer.push(ids)))

    def finish(self, cut: bool = False) -> list[tuple[str, bool]]:
        """What was held back; the reply is over. cut: not by the model, so that half a character at its end is none."""
        if self._matcher.has_matched():
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


class Client(Protocol):
    """What a session needs of `worker.client.EngineClient`; tests script it."""

    @property
    def alive(self) -> bool: ...
    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded: ...
    def generate(self, request: Generate) -> Iterator[Event]: ...
    def cancel(self, id: int) -> None: ...
    def save_cache(self, path: str) -> int: ...
    def restore_cache(self, path: str) -> int: ...


def reply_decoder(tokenizer: Tokenizer, prompt: list[int], stop_strings: tuple[str, ...] = (), begun: str = "") -> ReplyDecoder:
    """For the reply to `prompt` (token ids), which may have the beginning of it: `begun`, or an opened thought."""
    last = prompt[-thinking.TAIL_TOKENS :]
    if harmony.is_template(tokenizer.chat_template):
        made = ReplyDecoder(harmony.ChannelDetokenizer(tokenizer, begun, last), stop_strings)
        if begun:
            made.start_with(begun, ())
        return made
    opened = "" if begun else thinking.opened_thought(tokenizer.decode(last))
    made = ReplyDecoder(tokenizer.stream(), stop_strings, opened, channels=False)
    if begun:
        made.start_with(begun, last)
    return made


def stream(client: Client, request: Generate, into: ReplyDecoder, warned_before: bool) -> Replies:
    """Stream the reply to `request`. warned_before: a context nearly full was told of. Raises as the client does."""
    for event in client.generate(request):
        if isinstance(event, Progress):
            yield ReplyPiece("", event.stats)
        elif isinstance(event, Tokens) and not into.is_over():
            pieces = into.push(event.ids)
            if into.is_over():
                client.cancel(request.id)
            yield from (ReplyPiece(text, event.stats, thinking=thinks) for text, thinks in pieces or [("", False)])
        elif isinstance(event, Done):
            yield from (
                ReplyPiece(text, event.stats, thinking=thinks) for text, thinks in into.finish(cut=event.reason != "stop")
            )
            reason = "stop" if into.is_over() else event.reason
            cut = into.is_over() or reason != "stop"  # else the engine saw to it, also to what only a model can tell
            unmet = request.grammar if cut and request.grammar and not matches(request.grammar, into.answer) else None
            told = notices(reason, event.stats, warned_before, into.thinking, unmet)
            yield Reply(into.answer, reason, event.stats, told, into.thought, unmet)
