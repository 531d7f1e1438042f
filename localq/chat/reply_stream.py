"""One reply as it streams: engine events become pieces of thought and answer, then an end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from localq.chat.client import Client
from localq.chat.reply import Ending, Replies, Reply, ReplyPiece, notices
from localq.chat.reply_limits import LimitWatch, ReplyLimits
from localq.chat.stop_strings import Matcher
from localq.sanitize import sanitize
from localq.text import harmony, thinking
from localq.text.grammar import matches
from localq.text.thinking import ThoughtSplitter
from localq.text.tokenizer_like import DetokenizerLike, TokenizerLike
from localq.worker.messages import Done, Generate, Progress, Tokens


class ReplyDecoder:
    """Ids in, pieces out: (text, whether it is part of the thought), none of them empty.

    thought, answer   so far
    ids               of the reply as received, also those after a stop string
    grown             a piece was returned
    """

    def __init__(
        self, detokenizer: DetokenizerLike, stop_strings: Sequence[str] = (), opened: str = "", channels: bool = True
    ) -> None:
        """opened: start of the reply in the prompt (`thinking.thought_opening`). channels: see `ThoughtSplitter`."""
        self._detokenizer, self._matcher = detokenizer, Matcher(stop_strings)
        self._splitter = ThoughtSplitter(opened, channels)
        self.thought = self.answer = ""
        self.ids: list[int] = []
        self.grown = False

    def start_with(self, raw: str, before: Sequence[int]) -> None:
        """Continue the reply `raw`. before: the last ids of the prompt, with those of `raw`; they decide how the next
        ids are decoded, also of a character that is split between tokens."""
        self._detokenizer.push(before)
        thought, answer = self._splitter.push(raw.rstrip("\ufffd"))
        self.thought, self.answer = thought, answer

    @property
    def raw(self) -> str:
        """The reply as it is stored, without text that is still held back; empty before the first text."""
        return self._splitter.head + self.answer if self.thought or self.answer else ""

    @property
    def thinking(self) -> bool:
        """The thought has not ended: there is no answer yet."""
        return self._splitter.thinking

    @property
    def closing(self) -> str:
        """The mark that ends a thought in this reply."""
        return self._splitter.closing

    def is_over(self) -> bool:
        """A stop string was found, or the answer has ended: later ids are not part of the reply."""
        return self._matcher.has_matched() or self._detokenizer.over

    def push(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Add ids; return the text that is final now."""
        self.ids += ids
        return [] if self.is_over() else self._split(sanitize(self._detokenizer.push(ids)))

    def finish(self, cut: bool = False) -> list[tuple[str, bool]]:
        """End the reply; return the text that was held back. cut: the model did not end it, so half a character at the
        end is dropped."""
        if self._matcher.has_matched():
            return []
        held = sanitize(self._detokenizer.finish())
        pieces = self._split(held.rstrip("\ufffd") if cut else held)
        thought, answer = self._splitter.finish()
        return pieces + self._pieces(thought, self._matcher.finish(answer))

    def _split(self, text: str) -> list[tuple[str, bool]]:
        thought, answer = self._splitter.push(text)
        return self._pieces(thought, self._matcher.push(answer))

    def _pieces(self, thought: str, answer: str) -> list[tuple[str, bool]]:
        self.thought += thought
        self.answer += answer
        self.grown = self.grown or bool(thought or answer)
        return [(text, thinks) for text, thinks in ((thought, True), (answer, False)) if text]


def reply_decoder(
    tokenizer: TokenizerLike, prompt: list[int], stop_strings: tuple[str, ...] = (), begun: str = ""
) -> ReplyDecoder:
    """Decoder of the reply to `prompt` (token ids), which may end with its start: `begun`, or an opened thought."""
    last = prompt[-thinking.TAIL_TOKENS :]
    if harmony.is_template(tokenizer.chat_template):
        made = ReplyDecoder(harmony.ChannelDetokenizer(tokenizer, begun, last), stop_strings)
        if begun:
            made.start_with(begun, ())
        return made
    opened = "" if begun else thinking.thought_opening(tokenizer.decode(last))
    made = ReplyDecoder(tokenizer.stream(), stop_strings, opened, channels=False)
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
                yield from (ReplyPiece(text, event.stats, thinking=thinks) for text, thinks in pieces or [("", False)])
            elif isinstance(event, Done):
                yield from (
                    ReplyPiece(text, event.stats, thinking=thinks)
                    for text, thinks in into.finish(cut=event.reason != "stop" or bool(watch.reason))
                )
                yield self._end(event, warned_before, in_chat)

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
        unmet = request.grammar if cut and request.grammar and not matches(request.grammar, into.answer) else None
        ending = Ending(reason, stats, into.thinking, unmet, self._watch.cycle, in_chat, request.think_budget)
        return Reply(into.answer, reason, stats, notices(ending, warned_before), into.thought, unmet)


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
