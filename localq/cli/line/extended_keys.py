"""Keys in kitty's keyboard protocol, translated to the sequences that terminals send without it.

The protocol distinguishes Shift-Enter from Enter, but sends Ctrl and Alt in another form, which the line editor does
not know. Enhancements 1 (distinct keys) and 4 (the Latin letter beside that of another layout, for Ctrl-C) are used.
See sw.kovidgoyal.net/kitty/keyboard-protocol.
"""

from __future__ import annotations

import os
import re
import sys

_ON, OFF = "\x1b[>5u", "\x1b[<u"
_SHIFT, _ALT, _CTRL, _LOCKS = 1, 2, 4, 64 | 128
# ESC [ code:shifted:latin ; modifiers u | a legacy key, with modifiers while a lock is on
KEY = re.compile("\x1b\\[(?:(\\d+)(?::(\\d*))?(?::(\\d*))?(?:;(\\d+))?u|(\\d+);(\\d+)([A-HPQS~]))")
CUT = re.compile("\x1b\\[[\\d;:]*\\Z")  # an incomplete key at the end of the input
_CONTROLS = dict(
    zip(" @2[3\\4]5^6_-7/8?", "\0\0\0\x1b\x1b\x1c\x1c\x1d\x1d\x1e\x1e\x1f\x1f\x1f\x1f\x7f\x7f", strict=True)
)
_KEYPAD = dict(zip(range(57417, 57427), ["D", "C", "A", "B", "5~", "6~", "H", "F", "2~", "3~"], strict=True))
_ENTER, _TAB, _ESCAPE, _BACKSPACE, _KEYPAD_ENTER = 13, 9, 27, 127, 57414
_PRIVATE = range(57344, 63744)  # keys other than letters


def on() -> str:
    """The sequence that enables the protocol; empty on the Linux console, which misreads it."""
    return "" if os.environ.get("TERM") == "linux" else _ON


def off() -> str:
    """The sequence that disables it."""
    return OFF if on() else ""


def legacy_sequence(key: re.Match[str]) -> str:
    """The sequence of a terminal without the protocol for this key; empty if there is none."""
    if key[5]:
        return _with_locks(key)
    code, bits = int(key[1][:7]), int((key[4] or "1")[:4]) - 1 & ~_LOCKS
    if bits & ~(_SHIFT | _ALT | _CTRL):
        return ""  # of a window manager
    escape = "\x1b" if bits & _ALT else ""
    if code in (_ENTER, _KEYPAD_ENTER):
        return escape + "\r" if escape or not bits else "\n"
    if code == _TAB:
        return "\x1b[Z" if bits & _SHIFT else escape + "\t"
    if code == _BACKSPACE:
        return escape + ("\b" if bits & _CTRL else "\x7f")
    if code in _KEYPAD:
        return f"\x1b[{_KEYPAD[code]}"
    if code in _PRIVATE or (code < ord(" ") and code != _ESCAPE):
        return ""
    if bits & _CTRL:
        letter = _letter(int(key[3][:7]) if key[3] else code).lower()
        return escape + (chr(ord(letter) - 96) if "a" <= letter <= "z" else _CONTROLS.get(letter, letter))
    if bits & _SHIFT:
        return escape + (_letter(int(key[2][:7])) if key[2] else _letter(code).upper())
    return escape + _letter(code)


def _letter(code: int) -> str:
    return chr(code) if code <= sys.maxunicode and not 0xD800 <= code < 0xE000 else ""


def _with_locks(key: re.Match[str]) -> str:
    """The key without caps lock and num lock."""
    bits = int(key[6][:4]) - 1
    if not bits & _LOCKS:
        return key[0]
    bits &= ~_LOCKS
    if bits:
        return f"\x1b[{key[5]};{bits + 1}{key[7]}"
    if key[7] == "~":
        return f"\x1b[{key[5]}~"
    return f"\x1b{'O' if key[7] in 'PQS' else '['}{key[7]}"
