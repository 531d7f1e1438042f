"""Translation of llama.cpp's grammars (GBNF) into llguidance's dialect of Lark.

GBNF describes characters; Lark describes lexemes, which are greedy. `ws ::= [ \\n]*` as one lexeme would consume the
newline that a rule expects after it, and the reply could not end. So every character becomes a lexeme of its own, which
is exact, and slower than a grammar written in Lark.

The dialect is that of llama.cpp's grammars/README.md, without its `<token>` notation.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable

from localq.errors import LocalqError, usage_error

MAX_TEXT = 2**16  # characters
_HEAD = re.compile(r"[ \t]*([A-Za-z0-9_-]+)[ \t]*::=")
_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<head>[A-Za-z0-9_-]+[ \t]*::=)
    |(?P<name>[A-Za-z0-9_-]+)
    |"(?P<literal>(?:[^"\\\n]|\\.)*)"
    |\[(?P<characters>(?:[^\]\\\n]|\\.)*)\]
    |(?P<repeat>[*+?]|\{\s*\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?\})
    |(?P<sign>[.|()])""",
    re.VERBOSE,
)
_CHARACTER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<control>[nrt])|\\(?P<itself>[^A-Za-z0-9])|(?P<plain>[^\\])"
)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


def is_gbnf(text: str) -> bool:
    """Return whether a line of `text` begins with a GBNF rule."""
    return any(_HEAD.match(line) for line in text.splitlines())


def to_lark(text: str) -> str:
    """Return the grammar in Lark; `root` becomes `start`. Raises LocalqError (exit 2) with the line of the error."""
    if len(text) > MAX_TEXT:
        raise usage_error(
            "the grammar", f"too long (limit: {MAX_TEXT:,} characters)", "Shorten it, or write it in Lark."
        )
    return _Translation(text).lark()


def source_place(text: str, line: int, column: int) -> tuple[int, int]:
    """Line and column of the grammar `text` for a place in its translation; all are counted from 1."""
    translation = _Translation(text)
    lines = translation.lark().split("\n")
    offset = sum(len(each) + 1 for each in lines[: line - 1]) + min(column, len(lines[min(line, len(lines)) - 1])) - 1
    ends = list(itertools.accumulate(map(len, translation.out)))
    place = translation.places[min(bisect.bisect_right(ends, offset), len(ends) - 1)]
    return text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)


class _Translation:
    """Translation of one grammar, from left to right. depth: open parentheses."""

    def __init__(self, text: str) -> None:
        heads = dict.fromkeys(found[1] for line in text.splitlines() if (found := _HEAD.match(line)))
        self.rules = {name: f"r{number}" for number, name in enumerate(heads)} | {"root": "start"}
        self.text, self.place, self.depth = text, 0, 0
        self.done: set[str] = set()
        self.out: list[str] = []
        self.places: list[int] = []  # of what each part of `out` is the translation
        self.repeatable = False  # the last token is an item
        self.empty = False  # an alternative has begun and is empty so far

    def lark(self) -> str:
        """Return the whole grammar in Lark."""
        readers: dict[str, Callable[[str], None]] = {
            "head": self.head, "name": self.name, "literal": self.literal, "characters": self.characters,
            "repeat": self.repeat, "sign": self.sign,
        }  # fmt: skip
        while self.place < len(self.text):
            found = _TOKENS.match(self.text, self.place)
            if found is None or found.lastgroup is None:
                raise self.failure(f"syntax error at {self.text[self.place : self.place + 20]!r}")
            if found.lastgroup != "space":
                if not self.out and found.lastgroup != "head":
                    raise self.failure("expected a rule")
                readers[found.lastgroup](found[found.lastgroup])
            self.place = found.end()
        self.end_rule()
        if "root" not in self.done:
            raise self.failure("the rule `root` is missing")
        return "".join(self.out) + "\n"

    def failure(self, why: str) -> LocalqError:
        """An error with the current line number."""
        line = self.text.count("\n", 0, self.place) + 1
        return usage_error("the grammar", f"line {line}: {why}", "Fix the grammar.")

    def write(self, part: str) -> None:
        """Write a part of the translation."""
        self.out.append(part)
        self.places.append(self.place)

    def end_alternative(self) -> None:
        """End an alternative; Lark has a token for an empty one."""
        if self.empty:
            self.add('""')

    def end_rule(self) -> None:
        """End a rule."""
        self.end_alternative()
        if self.depth:
            raise self.failure("missing )")

    def add(self, item: str) -> None:
        """Write an item, which can be repeated."""
        self.write(" " + item)
        self.repeatable, self.empty = True, False

    def begin(self, sign: str) -> None:
        """Write a sign after which an alternative begins."""
        self.write(sign)
        self.repeatable, self.empty = False, True

    def head(self, token: str) -> None:
        """NAME ::="""
        name = token.removesuffix("::=").rstrip()
        self.end_rule()
        if name not in self.rules:
            raise self.failure(f"the rule `{name}` must start on a new line")
        if name in self.done:
            raise self.failure(f"the rule `{name}` is defined twice")
        self.done.add(name)
        self.begin(f"\n{self.rules[name]}:")

    def name(self, token: str) -> None:
        """The name of a rule."""
        if token not in self.rules:
            raise self.failure(f"unknown rule `{token}`")
        self.add(self.rules[token])

    def literal(self, token: str) -> None:
        """A literal, as single characters."""
        self.add(f"({' '.join(_quote(letter) for letter, _ in self.letters(token))})" if token else '""')

    def characters(self, token: str) -> None:
        """A character class, as a regular expression of code points."""
        negated = token.startswith("^")
        letters = self.letters(token[negated:])
        if not letters:
            raise self.failure("empty character class")
        parts, place = [], 0
        while place < len(letters):
            is_range = letters[place + 1 : place + 2] == [("-", True)] and place + 2 < len(letters)
            first, last = letters[place][0], letters[place + 2 * is_range][0]
            if last < first:
                raise self.failure(f"invalid range {first}-{last}")
            parts.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
            place += 3 if is_range else 1
        self.add(f"/[{'^' * negated}{''.join(parts)}]/")

    def repeat(self, token: str) -> None:
        """* + ? {m} {m,} {m,n}"""
        if not self.repeatable:
            raise self.failure(f"nothing to repeat before {token}")
        least, _, most = token.strip("{}").partition(",")
        if most.strip() and int(most) < int(least):
            raise self.failure(f"invalid repetition {token}")
        self.write("".join(token.split()))
        self.repeatable = False

    def sign(self, token: str) -> None:
        """. | ( )"""
        if token == ".":
            self.add("/(?s:.)/")
        elif token == "(":
            self.depth += 1
            self.begin(" (")
        elif token == "|":
            self.end_alternative()
            self.begin(" |")
        elif not self.depth:
            raise self.failure("unexpected )")
        else:
            self.depth -= 1
            self.end_alternative()
            self.add(")")

    def letters(self, escaped: str) -> list[tuple[str, bool]]:
        """The characters of `escaped`; True: written without a backslash."""
        out, place = [], 0
        while place < len(escaped):
            found = _CHARACTER.match(escaped, place)
            if found is None:
                raise self.failure(f"unknown escape {escaped[place : place + 2]}")
            out.append((self.letter(found), found.lastgroup == "plain"))
            place = found.end()
        return out

    def letter(self, found: re.Match[str]) -> str:
        """The character of one escape, or of none."""
        kind = str(found.lastgroup)
        if kind == "control":
            return _CONTROLS[found[kind]]
        if kind not in ("x", "u", "U"):
            return found[kind]
        code = int(found[kind], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self.failure(f"{found[0]} is not a valid character")
        return chr(code)


def _quote(letter: str) -> str:
    plain = letter.isprintable() and letter not in '"\\'
    return f'"{letter}"' if plain else f"/\\x{{{ord(letter):x}}}/"
