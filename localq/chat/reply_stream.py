"""One reply as it streams: engine events become pieces of thought and answer, then an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from localq.chat.client import Client
from localq.chat.reply import Ending, Replies, Reply, ReplyPiece, notices
from localq.chat.reply_limits import LimitWatch, ReplyLimits
from localq.chat.stop_strings import Matcher
from localq.sanitize import sanitize
from localq.stats import Stats
from localq.text import harmony, thinking
from localq.text.grammar import matches
from localq.text.thinking import ThoughtSplitter
from localq.text.tokenizer_like import DetokenizerLike, TokenizerLike
from localq.text.tools.declaration import ToolCall
from localq.worker.messages import Done, Generate, Progress, Tokens

if TYPE_CHECKING:  # start-up cost: most replies have no tools
    from localq.text.tools.stream import ToolStream


class ReplyDecoder:
    """Ids in, pieces out: (text, whether it is part of the thought), none of them empty.

    thought, answer   so far
    written           the answer with the text of calls, as the model wrote it
    ids               of the reply as received, also those after a stop string
    grown             a piece was returned

    With `tools` the answer is read for calls: they are in `calls`, each as soon as it is whole (`take_calls`), and
    `answer` is the text beside them. A stop string in a call breaks it off.
    """

    def __init__(
        self, detokenizer: DetokenizerLike, stop_strings: Sequence[str] = (), opened: str = "", channels: bool = True,
        tools: ToolStream | None = None,
    ) -> None:  # fmt: skip
        """opened: start of the reply in the prompt (`thinking.thought_opening`). channels: see `ThoughtSplitter`."""
        self._detokenizer, self._matcher, self._tools = detokenizer, Matcher(stop_strings), tools
        self._splitter = ThoughtSplitter(opened, channels, tools is not None)
        self._taken = 0  # calls that `take_calls` has returned
        self.thought = self.answer = self.written = ""
        self.ids: list[int] = []
        self.grown = False

    def start_with(self, raw: str, before: Sequence[int]) -> None:
        """Continue the reply `raw`. before: the last ids of the prompt, with those of `raw`; they decide how the next
        ids are decoded, also of a character that is split between tokens."""
        self._detokenizer.push(before)
        thought, answer = self._splitter.push(raw.rstrip("\ufffd"))
        self.written = answer
        self.thought, self.answer = thought, answer if self._tools is None else self._read(answer)

    @property
    def raw(self) -> str:
        """The reply as it is stored, without text that is still held back; empty before the first text."""
        return self._splitter.head + self.written if self.thought or self.written else ""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The tool calls so far."""
        return self._tools.calls if self._tools is not None else ()

    def take_calls(self) -> tuple[ToolCall, ...]:
        """The tool calls that have become whole since the last time."""
        taken, self._taken = self._taken, len(self.calls)
        return self.calls[taken:]

    @property
    def thinking(self) -> bool:
        """True while the thought has not ended: there is no answer yet."""
        return self._splitter.thinking

    @property
    def closing(self) -> str:
        """The mark that ends a thought in this reply."""
        return self._splitter.closing

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._matcher.matched

    def is_over(self) -> bool:
        """True once a stop string was found, or the answer has ended: later ids are not part of the reply."""
        return self._matcher.has_matched() or self._detokenizer.over

    def push(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Add ids; return the text that is final now."""
        self.ids += ids
        return [] if self.is_over() else self._split(sanitize(self._detokenizer.push(ids)))

    def finish(self, cut: bool = False) -> list[tuple[str, bool]]:
        """End the reply; return the text that was held back. cut: the model did not end it, so half a character at the
        end is dropped."""
        if self._matcher.has_matched():
            return self._finish_calls()
        held = sanitize(self._detokenizer.finish())
        pieces = self._split(held.rstrip("\ufffd") if cut else held)
        thought, answer = self._splitter.finish()
        pieces += self._pieces(thought, self._matcher.finish(answer))
        return pieces + self._finish_calls()

    def _finish_calls(self) -> list[tuple[str, bool]]:
        """The text of a call that is broken off."""
        return self._shown("", self._tools.text_of(self._tools.finish())) if self._tools is not None else []

    def _split(self, text: str) -> list[tuple[str, bool]]:
        thought, answer = self._splitter.push(text)
        return self._pieces(thought, self._matcher.push(answer))

    def _pieces(self, thought: str, answer: str) -> list[tuple[str, bool]]:
        self.written += answer
        return self._shown(thought, answer if self._tools is None else self._read(answer))

    def _read(self, answer: str) -> str:
        """The text beside calls, of a part of the answer and of messages to tools."""
        assert self._tools is not None
        text = self._tools.text_of(self._tools.push(answer))
        return text + "".join(
            self._tools.text_of(self._tools.push_message(*each)) for each in self._splitter.take_messages()
        )

    def _shown(self, thought: str, answer: str) -> list[tuple[str, bool]]:
        self.thought += thought
        self.answer += answer
        self.grown = self.grown or bool(thought or answer)
        return [(text, thinks) for text, thinks in ((thought, True), (answer, False)) if text]


def reply_decoder(
    tokenizer: TokenizerLike, prompt: list[int], stop_strings: tuple[str, ...] = (), begun: str = "",
    tools: ToolStream | None = None,
) -> ReplyDecoder:  # fmt: skip
    """Decoder of the reply to `prompt` (token ids), which may end with its start: `begun`, or an opened thought.

    tools: reads calls in the answer (`ToolFormat.stream`), where the prompt declares tools.
    """
    last = prompt[-thinking.TAIL_TOKENS :]
    if harmony.is_template(tokenizer.chat_template):
        channels = harmony.ChannelDetokenizer(tokenizer, begun, last, tools is not None)
        made = ReplyDecoder(channels, stop_strings, tools=tools)
        if begun:
            made.start_with(begun, ())
        return made
    opened = "" if begun else thinking.thought_opening(tokenizer.decode(last))
    detokenizer = tokenizer.stream() if tools is None else tokenizer.stream(tools.marks)
    made = ReplyDecoder(detokenizer, stop_strings, opened, channels=False, tools=tools)
    if begun:
        made.start_with(begun, last)
    return made


class _ReplyStream:
    """The stream of one reply."""

    def __init__(self, client: Client, request: Generate, into: ReplyDecoder, watch: LimitWatch) -> None:
        self._client, self._request, self._into, self._watch = client, request, into, watch

    def run(self, warned_before: bool, in_chat: bool) -> Replies:
        """Stream the reply."""
        into, watch = self._into, self._watch
        for event in self._client.generate(self._request):
            if isinstance(event, Progress):
                yield ReplyPiece("", event.stats)
            elif isinstance(event, Tokens) and not into.is_over() and not watch.reason:
                pieces = self._push(event.ids)
                if into.is_over() or watch.reason:
                    self._client.cancel(self._request.id)
                yield from self._reply_pieces(pieces or [("", False)], event.stats)
            elif isinstance(event, Done):
                held = into.finish(cut=event.reason != "stop" or bool(watch.reason))
                yield from self._reply_pieces(held, event.stats)
                yield self._end(event, warned_before, in_chat)

    def _reply_pieces(self, pieces: list[tuple[str, bool]], stats: Stats) -> Iterator[ReplyPiece]:
        """Pieces of text, then the calls that have become whole with them."""
        yield from (ReplyPiece(text, stats, thinking=thinks) for text, thinks in pieces)
        if calls := self._into.take_calls():
            yield ReplyPiece("", stats, calls=calls)

    def _push(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Push ids one by one, up to where a limit or the reply ends; return the text that is final now."""
        pieces: list[tuple[str, bool]] = []
        for id in ids:
            if self._into.is_over() or self._watch.is_full():
                break
            for text, thinks in self._into.push([id]):
                if pieces and pieces[-1][1] == thinks:
                    text = pieces.pop()[0] + text
                pieces.append((text, thinks))
            self._watch.count(self._into)
        return pieces

    def _end(self, event: Done, warned_before: bool, in_chat: bool) -> Reply:
        into, request, stats = self._into, self._request, event.stats
        reason = "stop" if into.is_over() else self._watch.reason or event.reason
        if self._watch.reason:  # without the tokens that came after it
            stats = dataclasses.replace(stats, generated_tokens=len(into.ids))
        cut = into.is_over() or reason != "stop"  # else the engine enforced it
        is_unmet = cut and request.grammar and not into.calls and not matches(request.grammar, into.written)
        unmet = request.grammar if is_unmet else None
        ending = Ending(reason, stats, into.thinking, unmet, self._watch.cycle, in_chat, request.think_budget)
        return Reply(into.answer, reason, stats, notices(ending, warned_before), into.thought, unmet, into.calls)


def stream(
    client: Client,
    request: Generate,
    into: ReplyDecoder,
    warned_before: bool,
    limits: ReplyLimits,
    decode: Callable[[list[int]], str],
    in_chat: bool = True,
) -> Replies:
    """Stream the reply to `request`: pieces, then a Reply. Raises as the client does.

    warned_before   the context was nearly full already
    decode          text of token ids
    in_chat         notices may name commands of a chat
    """
    return _ReplyStream(client, request, into, LimitWatch(limits, decode)).run(warned_before, in_chat)
