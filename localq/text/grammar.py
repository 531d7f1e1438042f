"""Constraints of a reply: a JSON schema, a grammar or a regular expression, by llguidance.

llguidance is imported only where there is a constraint (60 ms). Hostile input ends in an error: its size is limited
(`MAX_BYTES`), the time to compile it too (`MAX_SECONDS`: forty expressions that must all match would take hours), and
llguidance limits the work for one token.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from localq.disk import read_text
from localq.errors import LocalqError, usage_error
from localq.processes import run_with_timeout
from localq.sanitize import sanitize
from localq.text import gbnf

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from llguidance._lib import JsonCompileOptions

T = TypeVar("T")
MAX_BYTES = {"json_schema": 2**18, "lark": 2**18, "gbnf": 2**16, "regex": 2**16}
MAX_SECONDS = 10.0
MAX_MESSAGE = 240  # characters of a message of llguidance
STEP_ITEMS = 1_000_000  # items of one mask, 50 ms; llguidance's default of 50,000 is too low for GBNF
# Whitespace between parts of JSON: none, a space, or a line end with indentation. Without a limit small models write
# whitespace for ever. A schema's own "x-guidance" has precedence.
_WHITESPACE: JsonCompileOptions = {"whitespace_pattern": r" |\n[ \t]{0,40}"}
_CALLED = {
    "json_schema": "the JSON schema",
    "lark": "the grammar",
    "gbnf": "the grammar",
    "regex": "the regular expression",
}
ANY_JSON = "{}"
_LENIENT = 'Remove the keyword, or add "x-guidance": {"lenient": true} at the top level to ignore it.'
_BOM = "\ufeff"  # begins texts that some editors write


@dataclass(frozen=True)
class Grammar:
    """A constraint of replies. kind: "json_schema", "lark" (llguidance's dialect), "gbnf" or "regex"."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _CALLED:
            raise usage_error(str(self.kind)[:40], "unknown kind of grammar", f"Kinds: {', '.join(_CALLED)}.")
        try:
            size = len(self.text.encode())
        except (UnicodeEncodeError, AttributeError):
            raise usage_error(self.label, "not valid text", "Write it in UTF-8.") from None
        if size > MAX_BYTES[self.kind]:
            why = f"too large (limit: {MAX_BYTES[self.kind] // 1024} KiB)"
            raise usage_error(self.label, why, f"Shorten {self.label}.")

    @property
    def label(self) -> str:
        """Its name in an error."""
        return _CALLED[self.kind]

    def __str__(self) -> str:
        """One line for users: the kind and the beginning of the text."""
        start = " ".join(sanitize(self.text[:400]).split())
        return f"{self.kind} {start[:60]}{'...' if len(start) > 60 else ''}"


# ---- from what a user writes


def json_schema(value: str) -> Grammar:
    """A constraint from "json" (any JSON), a schema that begins with {, or a file path (with or without @)."""
    value = value.removeprefix(_BOM)
    if value.strip() == "json":
        return Grammar("json_schema", ANY_JSON)
    return Grammar("json_schema", value if value.lstrip().startswith("{") else _content(value))


def grammar(value: str) -> Grammar:
    """A constraint from a grammar (it has a colon) or a file path (with @ if that has one too); ::= means GBNF."""
    value = value.removeprefix(_BOM)
    text = value if ":" in value and not value.startswith("@") else _content(value)
    return Grammar("gbnf" if gbnf.is_gbnf(text) else "lark", text)


def regex(pattern: str) -> Grammar:
    """A constraint from a pattern that the whole reply must match."""
    return Grammar("regex", pattern)


def _content(value: str) -> str:
    return read_text(Path(value.removeprefix("@")))


# ---- llguidance


def check(wanted: Grammar) -> list[str]:
    """Warnings about a grammar. Raises LocalqError (exit 2) where it is malformed or allows no reply.

    Needs no model: tokens of a model that a grammar names are checked with the model (`worker.token_masks`).
    """
    import llguidance  # start-up cost: only where there is a grammar

    compiled = compile_grammar(wanted)
    failed, messages = _in_time(
        wanted, lambda: llguidance.LLMatcher.validate_grammar_with_warnings(compiled, None, limits=limits())
    )
    if failed:
        refuse(wanted, messages[0])
    known = [line for line in messages if line.startswith(("no tokenizer", "oneOf not fully"))]
    if not any(line.startswith("no tokenizer") for line in known):
        found = matcher(wanted, llguidance.LLTokenizer("byte"))
        found.compute_bitmask()  # fails if no first byte is allowed
        if found.is_error():
            refuse(wanted, found.get_error())
    notes = _compiled_schema(wanted).notes if wanted.kind == "json_schema" else ()
    return [*map(_one_line, notes), *(_one_line(line, wanted) for line in messages if line not in known)]


def matcher(wanted: Grammar, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher of a grammar over the tokens of `vocabulary`. Raises LocalqError (exit 2)."""
    from llguidance import LLMatcher  # start-up cost

    compiled = compile_grammar(wanted)
    found = _in_time(wanted, lambda: LLMatcher(vocabulary, compiled, log_level=0, limits=limits()))
    if found.is_error():
        refuse(wanted, found.get_error())
    return found


def matches(wanted: Grammar, text: str) -> bool:
    """Return whether `text` is a complete reply of the grammar; False for a grammar that needs the model's tokens."""
    import llguidance  # start-up cost: only where there is a grammar

    try:
        found = matcher(wanted, llguidance.LLTokenizer("byte"))
    except LocalqError:
        return False
    raw = list(text.encode("utf-8", "replace"))
    return found.try_consume_tokens(raw) == len(raw) and found.is_accepting()


def _in_time(wanted: Grammar, work: Callable[[], T]) -> T:
    try:
        return run_with_timeout(MAX_SECONDS, work)
    except TimeoutError:
        why = f"compilation takes more than {MAX_SECONDS:.0f} s"
        raise usage_error(wanted.label, why, f"Simplify {wanted.label}.") from None


def compile_grammar(wanted: Grammar) -> str:
    """The grammar in llguidance's form. Raises LocalqError (exit 2) for errors found on the way."""
    from llguidance import LLMatcher  # start-up cost

    if wanted.kind == "json_schema":
        return _compiled_schema(wanted).text
    if wanted.kind == "regex":
        from localq.text.ascii_classes import ascii_classes  # start-up cost, as below

        return LLMatcher.grammar_from_regex(ascii_classes(wanted.text))
    return LLMatcher.grammar_from_lark(gbnf.to_lark(wanted.text) if wanted.kind == "gbnf" else wanted.text)


@dataclass(frozen=True)
class _CompiledSchema:
    """A JSON schema in llguidance's form; notes: what of it is not enforced."""

    text: str
    notes: tuple[str, ...]


@functools.lru_cache(maxsize=4)
def _compiled_schema(wanted: Grammar) -> _CompiledSchema:
    from localq.text import schema  # start-up cost: only where there is a schema

    parsed = _parse(wanted)
    try:
        prepared = _in_time(wanted, lambda: schema.prepare(parsed))
    except schema.UnsupportedKeyword as error:
        why = f'"{error.keyword}" at {error.path} is not supported'
        raise usage_error(wanted.label, why, _LENIENT) from None
    except RecursionError:
        raise _nested_too_deeply(wanted) from None
    text, notes = json.dumps(prepared.schema), prepared.notes
    own = parsed.get("x-guidance", {}) if isinstance(parsed, dict) else None
    overrides = _WHITESPACE if isinstance(own, dict) and "whitespace_flexible" not in own else {}
    grammar_text, failure = _from_schema(wanted, text, overrides)
    if failure.startswith("oneOf constraints"):
        grammar_text, _ = _from_schema(wanted, text, {**overrides, "coerce_one_of": True})
        notes = (*notes, schema.one_of_note(parsed))
    return _CompiledSchema(grammar_text, notes)


def _from_schema(wanted: Grammar, text: str, overrides: JsonCompileOptions) -> tuple[str, str]:
    """(the grammar, what is wrong with it or "")."""
    from llguidance import LLMatcher  # start-up cost

    try:
        made = LLMatcher.grammar_from_json_schema(text, overrides or None)
    except ValueError as error:
        refuse(wanted, str(error))
    failed, messages = _in_time(wanted, lambda: LLMatcher.validate_grammar_with_warnings(made, None, limits=limits()))
    return made, messages[0] if failed else ""


@functools.cache
def limits() -> LLParserLimits:
    """llguidance's limits, raised for GBNF, and without the parser state in messages."""
    from llguidance import LLParserLimits  # start-up cost

    return LLParserLimits(step_max_items=STEP_ITEMS, verbose_errors=False)


def refuse(wanted: Grammar, message: str, place: str = "") -> NoReturn:
    """Raise llguidance's message as a LocalqError (exit 2). place: where in a reply it fails."""
    why, next_step = _one_line(message, wanted), f"Fix {wanted.label}."
    if message.startswith("NoExtensionBias"):
        why, next_step = "no reply can match it", f"Relax {wanted.label}."
    elif "Unimplemented keys" in message:
        next_step = _LENIENT
    elif message.startswith("recursion limit"):
        why, next_step = "too deeply nested", f"Simplify {wanted.label}."
    elif any(word in message for word in ("too big", "too large", "Too many", "too many", "max is")):
        next_step = f"Simplify {wanted.label}."
    raise usage_error(wanted.label, f"{place}{why}", next_step)


def _one_line(message: str, wanted: Grammar | None = None) -> str:
    """The first line of a message, or the error of a regular expression without its listing.

    A place in a translated grammar becomes that in `wanted`, which the user wrote.
    """
    lines = [line.strip() for line in message.split("\n") if line.strip() and "<non-verbose/>" not in line]
    named = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = re.sub(r"^.*\(in regex\): ", "", sanitize((named or lines or ["not valid"])[0]))
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", text)
    if place:
        line, column = int(place[1]), int(place[2])
        if wanted is not None and wanted.kind == "gbnf":
            line, column = gbnf.source_place(wanted.text, line, column)
        text = f"line {line}, column {column}: {text[place.end() :]}"
    return text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]}..."


def _parse(wanted: Grammar) -> Any:
    """The parsed schema; Python's JSON errors name the line."""
    try:
        return json.loads(wanted.text)
    except RecursionError:
        raise _nested_too_deeply(wanted) from None
    except ValueError as error:
        raise usage_error(wanted.label, f"not valid JSON: {error}", f"Fix {wanted.label}.") from error


def _nested_too_deeply(wanted: Grammar) -> LocalqError:
    return usage_error(wanted.label, "too deeply nested", f"Simplify {wanted.label}.")
