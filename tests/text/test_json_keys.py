"""Keys of a JSON text that is being written: which bytes would write one for the second time."""

from __future__ import annotations

import json
import random

import pytest

from localq.text.json_keys import KeyScanner


def scanner(text: str) -> KeyScanner:
    made = KeyScanner()
    made.push(text.encode())
    return made


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('{"a": 1, "', 'a"'),
        ('{"a": 1, "a', '": 2'),
        ('{"a": 1', ', "a":'),
        ('{"a": "x\\"', '", "a"'),
        ('{"ship": [{"a": 1}], "b": {"ship": 2}, "sh', 'ip"'),
        ('{"\u00fc": 1, "', '\\u00fc"'),
        ('{"a\\"b": 1, "a\\', '"b"'),
        ('{"": 1, ', '""'),
        ('[{"a": 1, "a"', ', "a"'),
    ],
)
def test_a_key_that_its_object_has_would_repeat(text, rest):
    assert scanner(text).would_repeat(rest.encode())


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ('{"a": 1, "', 'ab"'),
        ('{"a": "', 'a"'),
        ('{"a": 1, "b": "a', '"'),
        ('{"a": {"', 'a"'),
        ('[{"a": 1}, {"', 'a"'),
        ('{"a": ["x", "', 'a"'),
        ('{"a": 1, "a\\', '""'),
        ('["a", "', 'a"'),
        ('"a', '"'),
    ],
)
def test_anything_else_would_not(text, rest):
    assert not scanner(text).would_repeat(rest.encode())


def test_a_quote_that_ends_a_known_key_is_known_wherever_the_key_is_cut():
    for known in ("a", "a b", '"', "\\", "ü", ""):
        written = json.dumps(known)[1:-1].encode()
        for cut in range(len(written) + 1):
            if b'"' not in written[cut:] and not written[:cut].endswith(b"\\"):
                made = scanner(json.dumps({known: 1})[:-1] + ', "')
                made.push(written[:cut])
                assert made.ends_known(written[cut:])
                assert not made.ends_known(written[cut:] + b"x")


def test_whether_a_text_repeats_a_key_is_what_a_parser_says_however_it_is_cut():
    choices = random.Random(7)

    def value(depth: int) -> str:
        kind = choices.choice("snoa" if depth else "sn")
        if kind == "s":
            return json.dumps(choices.choice(["a", "b", '"', "{", ",", "\\"]))
        if kind == "n":
            return "1"
        parts = [value(depth - 1) for _ in range(choices.randrange(4))]
        if kind == "a":
            return f"[{', '.join(parts)}]"
        return f"{{{', '.join(f'{json.dumps(choices.choice(KEYS))}: {part}' for part in parts)}}}"

    KEYS = ["a", "b", "c", "\\", '"a', "ü", "{"]
    seen = set()
    for _ in range(400):
        text, repeats = value(4), []

        def pairs(found: list[tuple[str, object]]) -> None:
            repeats.append(len({key for key, _ in found}) < len(found))  # noqa: B023

        json.loads(text, object_pairs_hook=pairs)
        made = KeyScanner()
        raw = text.encode()
        while raw:
            size = choices.randrange(1, 4)
            made.push(raw[:size])
            raw = raw[size:]
        assert made.repeats == any(repeats)
        seen.add(made.repeats)
    assert seen == {True, False}
