"""One filter for all text that reaches a terminal from models, files, users and the hub.

A model can be talked into printing escape sequences (OSC 52 writes the clipboard, OSC 8 hides a link's target, DCS and
CSI redraw the screen), and bidi overrides make text read otherwise than it is. None of that is ever needed in a chat.
"""

from __future__ import annotations

import re

# C0 but \t \n, DEL, C1, bidi embeddings/overrides/isolates, line and paragraph separators, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def sanitize(text: str) -> str:
    """`text` without control characters (tab and newline stay), C1 codes, bidi overrides and lone surrogates.

    Works on any split of a text: sanitize(a) + sanitize(b) == sanitize(a + b), so streams can pass piece by piece.
    """
    return _UNSAFE.sub("", text)


def marked(text: str) -> str:
    """`text` with U+FFFD for what `sanitize` takes out: for text that is being edited, whose places must stay."""
    return _UNSAFE.sub("\ufffd", text)
