"""Comparison of two models' tokenizers: if they are the same, one can draft for the other.

Ids of the same text must be the same. The vocabularies are compared id by id, special tokens included; then the ids of
sample texts, because files state differently from release to release how a text is split. Ids that only the draft model
has, and the padding of an embedding, are no difference.
"""

from __future__ import annotations

import re

from localq.errors import LocalqError, usage_error
from localq.text.tokenizer import Tokenizer

# What tokenizers treat differently: numbers, contractions, runs of spaces and line ends, code, scripts, emoji.
SAMPLES = (
    "The year 1984, 3.14159 and 1,234,567: don't we'll I'VE They're naïve café",
    "def f(x_1, *args):\n    return {'a': [x for x in args if x != 0]}\n\n\n\tif (a<=b)&&(c||d);\r\n  //   end",
    "  leading, trailing   \n \n\t\tspaces  ",
    "Größe Ελληνικά русский עברית العربية हिन्दी 日本語のテキスト 한국어 ไทย 你好，世界。",
    "🙂👩‍👩‍👧 e\u0301 \u00e9 ﬁ Ⅳ ½ \u200b \ufeff<|x|> </s> <s> [INST] ##1",
    "HTTPServerError camelCase snake_case SCREAMING_CASE https://example.org/a?b=c&d=%20#e user@example.org",
)
_PADDING = re.compile(
    r"\[PAD\d+\]|<unused_?\d+>|<\|?(reserved|extra|placeholder|dummy)[^>]*>|\[(unused|control)_?\d+\]", re.I
)


def check(name: str, target: Tokenizer, draft_name: str, draft: Tokenizer) -> None:
    """Raise LocalqError (exit 2) with the reason, if `draft` cannot draft for the model `name` of `target`."""
    if reason := difference(target, draft):
        raise mismatch(draft_name, f"the tokenizer differs from that of {name}: {reason}")


def mismatch(draft_name: str, why: str) -> LocalqError:
    """The error (exit 2) for a model that cannot draft."""
    return usage_error(f"draft model {draft_name}", why, "Use a small model from the same family, or --draft auto.")


def difference(target: Tokenizer, draft: Tokenizer) -> str:
    """Return the difference between two tokenizers, in a few words; empty if they are the same."""
    ours, theirs = (_texts(each) for each in (target, draft))
    shared = [id for id in ours.keys() & theirs.keys() if id < min(target.rows, draft.rows)]
    differing = [id for id in shared if ours[id] != theirs[id] and not _is_padding(ours[id], theirs[id])]
    if differing:
        first = min(differing)
        return f"token {first} is {theirs[first]!r:.40} instead of {ours[first]!r:.40}"
    lacking = [id for id, text in ours.items() if id >= draft.rows and not _PADDING.fullmatch(text)]
    if lacking:
        return f"{len(lacking)} tokens are missing (first: {ours[min(lacking)]!r:.40})"
    if len(shared) < 0.9 * len(ours):
        return f"they share only {len(shared)} of {len(ours)} tokens"
    for sample in SAMPLES:
        if target.encode(sample) != draft.encode(sample):
            return "they split text into tokens differently"
    return ""


def _texts(tokenizer: Tokenizer) -> dict[int, str]:
    return {id: text for text, id in tokenizer.backend.get_vocab(with_added_tokens=True).items()}


def _is_padding(*texts: str) -> bool:
    return any(_PADDING.fullmatch(text) for text in texts)
