"""`PartialAnswer`: an answer while it is made, with rounds of tool calls before its last reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence

from localq.chat.history.conversation import Message
from localq.chat.history.tool_rounds import CallRecord, ToolRound
from localq.chat.reply import Ending, Reply, ReplyPiece, notices
from localq.chat.reply_stream import ReplyDecoder
from localq.text import harmony
from localq.text.tokenizer_like import TokenizerLike

AnswerParts = Generator[ReplyPiece, None, Reply | None]  # pieces; returns the end of the last reply, if it has one


class PartialAnswer:
    """The rounds that have ended, and the reply that streams.

    rounds    text, calls and results so far
    incoming  decoder of the reply
    begun, exact   the start of the reply in its prompt, and its ids where they are known (`PromptBuilder.reply_start`)
    """

    def __init__(
        self, tokenizer: TokenizerLike, rounds: Sequence[ToolRound] = (), begun: str = "", exact: Sequence[int] = ()
    ) -> None:
        self.incoming, self.rounds = ReplyDecoder(tokenizer.stream()), tuple(rounds)
        self._template = tokenizer.chat_template  # by which the stored text is in channels or in tags
        self.begun, self.exact = begun, list(exact)
        self._before = len(self.rounds)
        self._open = False  # a reply has begun that is no round yet

    @property
    def made_rounds(self) -> int:
        """Rounds of this answer, without those of a reply that it continues."""
        return len(self.rounds) - self._before

    @property
    def grown(self) -> bool:
        """True if something has arrived that is to be kept."""
        return self.made_rounds > 0 or (self._open and self.incoming.grown)

    def begin(self, incoming: ReplyDecoder) -> ReplyDecoder:
        """Begin a reply after the rounds; returns its decoder."""
        self.incoming, self._open = incoming, True
        return incoming

    def message(self, complete: bool) -> Message:
        """The answer as it is stored."""
        return Message("assistant", self._stored() if self._open else "", complete, rounds=self.rounds)

    def exact_ids(self) -> list[int] | None:
        """Ids of the text after the last round; None where they are not exactly its text."""
        incoming = self.incoming
        is_exact = self._open and not incoming.calls and not incoming.is_over()
        return self.exact + incoming.ids if is_exact and (self.exact or not self.begun) else None

    def end_round(self, calls: Sequence[CallRecord]) -> ToolRound:
        """The reply ended in these calls: it becomes a round, and another reply may begin."""
        ended = ToolRound(self._stored(), tuple(calls))
        self.rounds, self._open = (*self.rounds, ended), False
        self.begun, self.exact = "", []
        return ended

    def cut_short(self, end: Reply, reason: str, in_chat: bool) -> Reply:
        """The end of an answer that no reply follows, although it called tools. reason: "cancelled" or TOOL_ROUNDS."""
        ending = Ending(reason, end.stats, in_chat=in_chat, rounds=self.made_rounds)
        return dataclasses.replace(end, reason=reason, notices=notices(ending, warned_before=True))

    def _stored(self) -> str:
        """The text of the reply as it is stored, without what the model wrote of its calls."""
        incoming, raw = self.incoming, self.incoming.raw
        if not incoming.calls:
            return raw
        if harmony.is_template(self._template):
            said = incoming.thought or incoming.answer
            return harmony.format_reply(self._template, incoming.thought, incoming.answer, False) if said else ""
        return raw[: len(raw) - len(incoming.written)] + incoming.answer
