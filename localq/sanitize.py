"""The filter for all text from models, files, users and the hub that reaches a terminal.

Escape sequences can write the clipboard (OSC 52), hide a link's target (OSC 8) or redraw the screen (DCS, CSI), and
bidi overrides change how text reads. A chat needs none of them.
"""

from __future__ import annotations

import re

# C0 but \t \n, DEL, C1, bidi embeddings/overrides/isolates, line and paragraph separators, lone surrogates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def sanitize(text: str) -> str:
    """`text` without control characters (but tab, newline), C1, bidi overrides, lone surrogates.

    Works piece by piece: sanitize(a) + sanitize(b) == sanitize(a + b).
    """
    return _UNSAFE.sub("", text)


def replace_unsafe(text: str) -> str:
    """`text` with U+FFFD for each character that `sanitize` removes, which keeps positions."""
    return _UNSAFE.sub("\ufffd", text)
