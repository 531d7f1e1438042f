"""What a chat template writes around turns, and text of others that must not look like it. Torch-free.

A tokenizer makes the token that ends a turn of the words "<|im_end|>" wherever they stand, in a pasted page or a file
too, and in what a model wrote about it: who wrote these could go on as the system or as the model. A zero-width space
behind the first character makes text of them, which people and models read alike. Other special tokens are let through:
some are meant (fill in the middle).
"""

from __future__ import annotations

import functools
import re

BREAK = "\u200b"
_MARK = re.compile(r"<\|\w{1,64}\|>|<(?:start|end)_of_turn>|\[/?[A-Z_]{1,64}\]")
_ANY = r"<\|\w{1,64}\|>"
_PUT_TOGETHER = re.compile(r"""<\|['"]""")  # '<|' + message['role'] + '|>'


def plain(template: str | None, text: str) -> str:
    """`text` for a model with this chat template, without what frames its turns."""
    marks = _marks(template or "")
    return marks.sub(lambda found: found[0][0] + BREAK + found[0][1:], text) if marks else text


@functools.lru_cache(maxsize=8)
def _marks(template: str) -> re.Pattern[str] | None:
    written = [re.escape(mark) for mark in sorted(set(_MARK.findall(template)))]
    if _PUT_TOGETHER.search(template):
        written.append(_ANY)
    return re.compile("|".join(written)) if written else None
