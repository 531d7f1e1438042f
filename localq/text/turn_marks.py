"""Turn marks: what a chat template writes around messages. In a message they are text, so that no page forges a turn.

special   special tokens that the rendered or written template has, and those that the tokenizer's files name (BOS, EOS)
added     other added tokens, and words in brackets (`[INST]`, `<<SYS>>`) that the rendered template has

The template is rendered with probes: every role, with and without a system prompt. Tags of thoughts that are no special
tokens are no turn marks; users write them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from localq.errors import LocalqError
from localq.text import template, thought_tags
from localq.text.tokenizer_files import encode_within

if TYPE_CHECKING:
    import tokenizers

BREAK = "\u200b"  # a zero-width space: a model reads the mark as text, and people see it as it is
MAX_SECONDS = 20.0  # to find marks in a normalized text
ROUNDS = 8  # a mark may lie in another; what still stands then is left out
_SAID = ("How so", "Quite so indeed", "Why then", "Just so")  # letters: all else in the rendered text is the template's
_PROBES = (
    ("user",),
    ("user", "assistant", "user"),
    ("system", "user", "assistant", "user"),
    ("developer", "user"),
    ("user", "assistant", "tool", "assistant"),
)
_IN_BRACKETS = re.compile(r"[<\[]+[^\s<>\[\]]{1,64}[>\]]+")
_BETWEEN_SIGNS = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)


class TurnMarks:
    """The marks of one model. normalized: those that its tokenizer finds after this `normalizer`."""

    def __init__(
        self,
        marks: Iterable[str] = (),
        normalized: Iterable[str] = (),
        normalizer: tokenizers.normalizers.Normalizer | None = None,
    ) -> None:
        self.marks = frozenset(mark for mark in marks if mark.strip())
        self._normalized, self._normalizer = self.marks.intersection(normalized), normalizer
        # A mark of one character cannot be broken. Such marks come first: without them others may come together.
        self._broken = {mark: "" for mark in self.marks if len(mark) == 1 or BREAK in mark}
        self._broken |= {mark: mark[0] + BREAK + mark[1:] for mark in self.marks - self._broken.keys()}

    def escape(self, text: str) -> str:
        """`text` with every mark broken by a zero-width space, so that it is plain text."""
        if self._finder is not None:
            text = _escape_found(self._finder, text)
        for mark, broken in self._broken.items():
            while mark in text:  # again where two overlap
                text = text.replace(mark, broken)
        return text

    @functools.cached_property
    def _finder(self) -> tokenizers.Tokenizer | None:
        """A tokenizer of the normalized marks alone, which finds them as the model's own does."""
        if self._normalizer is None or not self._normalized:
            return None
        from tokenizers import AddedToken, Tokenizer, models  # start-up cost

        made = Tokenizer(models.BPE())
        made.normalizer = self._normalizer
        made.add_tokens([AddedToken(mark, normalized=True) for mark in sorted(self._normalized)])
        return made


NO_MARKS = TurnMarks()


def find(
    backend: tokenizers.Tokenizer, special: Mapping[str, str], stop_ids: Iterable[int], chat_template: str | None
) -> TurnMarks:
    """The turn marks of a tokenizer. special: names of special tokens -> their text; stop_ids: end a reply.

    Raises `template.LimitExceeded` where rendering does not end.
    """
    if chat_template is None:
        return NO_MARKS
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    rendered = _rendered(chat_template, special)
    named = {*special.values(), *filter(None, map(backend.id_to_token, stop_ids))}
    marks = {text for text, token in added.items() if token.special and (text in rendered or text in chat_template)}
    marks |= {text for text in named & added.keys() if len(text) > 1}  # some name a punctuation mark as padding
    marks |= {text for text in added if text in rendered and _frames(text)}
    words = {word for word in _IN_BRACKETS.findall(rendered) if not thought_tags.is_shown(word)}
    return TurnMarks(marks | words, {text for text in marks if added[text].normalized}, backend.normalizer)


def _frames(text: str) -> bool:
    """Return whether an added token, special or not, frames turns; white space and role names are added tokens, too."""
    return _BETWEEN_SIGNS.fullmatch(text) is not None and not thought_tags.is_shown(text)


def _rendered(chat_template: str, special: Mapping[str, str]) -> str:
    """The text of all probes that the template accepts."""
    texts = []
    for roles in _PROBES:
        messages = [{"role": role, "content": said} for role, said in zip(roles, _SAID, strict=False)]
        for prompt in (False, True):
            try:
                texts.append(template.render(chat_template, messages, special, add_generation_prompt=prompt))
            except template.LimitExceeded:
                raise
            except LocalqError:  # it rejects this conversation, or fails on it: the user's is reported
                continue
    return "\n".join(texts)


def _escape_found(finder: tokenizers.Tokenizer, text: str) -> str:
    for _ in range(ROUNDS):
        found = [place for place in _places(finder, text) if place[1] - place[0] > 1]
        if not found:
            break
        cuts = [0, *(start + 1 for start, _ in found), len(text)]
        text = BREAK.join(text[start:end] for start, end in itertools.pairwise(cuts))
    while found := _places(finder, text):  # a mark made of one character, or where the normalizer removes the break
        cuts = [0, *itertools.chain(*found), len(text)]
        text = "".join(text[start:end] for start, end in zip(cuts[::2], cuts[1::2], strict=True))
    return text


def _places(finder: tokenizers.Tokenizer, text: str) -> list[tuple[int, int]]:
    """Start and end of each mark, without overlaps and in order."""
    plain = text.encode("utf-8", "replace").decode()  # lone surrogates are no text
    return [place for place in encode_within(MAX_SECONDS, finder, plain).offsets if place[1] > place[0]]
