"""llama.cpp's grammars (GBNF) as llguidance's dialect of Lark. Torch-free.

GBNF describes characters; Lark describes lexemes, each of which takes as much as it can. `ws ::= [ \\n]*` as one lexeme
would swallow the newline that a rule wants behind it, and the reply could never end. So every character becomes a
lexeme of its own here, which is exact, and slower than a grammar that is written in Lark (README has figures).

The dialect is that of llama.cpp's grammars/README.md, without its `<token>` notation.
"""

from __future__ import annotations

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
    """`text` has a rule in GBNF's notation at the beginning of a line."""
    return any(_HEAD.match(line) for line in text.splitlines())


def to_lark(text: str) -> str:
    """The same language in Lark; `root` becomes `start`. Raises LocalqError (exit 2) with the line that is wrong."""
    if len(text) > MAX_TEXT:
        raise usage_error("the grammar", f"it has more than {MAX_TEXT:,} characters", "Write it in Lark, or shorter.")
    return _Translation(text).lark()


class _Translation:
    """One grammar, read from left to right. `depth`: parentheses that are open."""

    def __init__(self, text: str) -> None:
        heads = dict.fromkeys(found[1] for line in text.splitlines() if (found := _HEAD.match(line)))
        self.rules = {name: f"r{number}" for number, name in enumerate(heads)} | {"root": "start"}
        self.text, self.place, self.depth = text, 0, 0
        self.done: set[str] = set()
        self.out: list[str] = []
        self.repeatable = False  # what was read last is an item
        self.empty = False  # an alternative has begun and has nothing yet

    def lark(self) -> str:
        """All of it."""
        readers: dict[str, Callable[[str], None]] = {
            "head": self.head, "name": self.name, "literal": self.literal, "characters": self.characters,
            "repeat": self.repeat, "sign": self.sign,
        }  # fmt: skip
        while self.place < len(self.text):
            found = _TOKENS.match(self.text, self.place)
            if found is None or found.lastgroup is None:
                raise self.failure(f"{self.text[self.place : self.place + 20]!r} is not understood")
            if found.lastgroup != "space":
                if not self.out and found.lastgroup != "head":
                    raise self.failure("it does not begin with a rule")
                readers[found.lastgroup](found[found.lastgroup])
            self.place = found.end()
        self.end_rule()
        if "root" not in self.done:
            raise self.failure("there is no rule `root`")
        return "".join(self.out) + "\n"

    def failure(self, why: str) -> LocalqError:
        """An error at the place that is read now."""
        line = self.text.count("\n", 0, self.place) + 1
        return usage_error("the grammar", f"line {line}: {why}", "Correct the grammar.")

    def end_alternative(self) -> None:
        """Lark wants a word for nothing."""
        if self.empty:
            self.add('""')

    def end_rule(self) -> None:
        """A rule is whole, or nothing was read yet."""
        self.end_alternative()
        if self.depth:
            raise self.failure("a parenthesis is not closed")

    def add(self, item: str) -> None:
        """Something that can be repeated."""
        self.out.append(" " + item)
        self.repeatable, self.empty = True, False

    def begin(self, sign: str) -> None:
        """Something that an alternative follows."""
        self.out.append(sign)
        self.repeatable, self.empty = False, True

    def head(self, token: str) -> None:
        """NAME ::="""
        name = token.removesuffix("::=").rstrip()
        self.end_rule()
        if name not in self.rules:
            raise self.failure(f"the rule `{name}` does not begin a line")
        if name in self.done:
            raise self.failure(f"the rule `{name}` is there twice")
        self.done.add(name)
        self.begin(f"\n{self.rules[name]}:")

    def name(self, token: str) -> None:
        """The name of a rule."""
        if token not in self.rules:
            raise self.failure(f"there is no rule `{token}`")
        self.add(self.rules[token])

    def literal(self, token: str) -> None:
        """A text, of single characters."""
        self.add(f"({' '.join(_quoted(letter) for letter, _ in self.letters(token))})" if token else '""')

    def characters(self, token: str) -> None:
        """A class of characters, as a regular expression in which every character is a number."""
        negated = token.startswith("^")
        letters = self.letters(token[negated:])
        if not letters:
            raise self.failure("a class of characters is empty")
        parts, place = [], 0
        while place < len(letters):
            is_range = letters[place + 1 : place + 2] == [("-", True)] and place + 2 < len(letters)
            first, last = letters[place][0], letters[place + 2 * is_range][0]
            if last < first:
                raise self.failure(f"the range {first}-{last} is empty")
            parts.append(f"\\x{{{ord(first):x}}}-\\x{{{ord(last):x}}}")
            place += 3 if is_range else 1
        self.add(f"/[{'^' * negated}{''.join(parts)}]/")

    def repeat(self, token: str) -> None:
        """* + ? {m} {m,} {m,n}"""
        if not self.repeatable:
            raise self.failure(f"there is nothing that {token} could repeat")
        self.out.append("".join(token.split()))
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
            raise self.failure("a parenthesis is closed that was not opened")
        else:
            self.depth -= 1
            self.end_alternative()
            self.add(")")

    def letters(self, escaped: str) -> list[tuple[str, bool]]:
        """The characters that `escaped` stands for; True: written without a backslash."""
        out, place = [], 0
        while place < len(escaped):
            found = _CHARACTER.match(escaped, place)
            if found is None:
                raise self.failure(f"the escape {escaped[place : place + 2]} is not known")
            out.append((self.letter(found), found.lastgroup == "plain"))
            place = found.end()
        return out

    def letter(self, found: re.Match[str]) -> str:
        """The character that one escape, or no escape, stands for."""
        kind = str(found.lastgroup)
        if kind == "control":
            return _CONTROLS[found[kind]]
        if kind not in ("x", "u", "U"):
            return found[kind]
        code = int(found[kind], 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise self.failure(f"{found[0]} is no character")
        return chr(code)


def _quoted(letter: str) -> str:
    plain = letter.isprintable() and letter not in '"\\'
    return f'"{letter}"' if plain else f"/\\x{{{ord(letter):x}}}/"
