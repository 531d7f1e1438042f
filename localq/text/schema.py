"""JSON schemas as llguidance takes them: what it lacks is rewritten, noted or refused by keyword and path.

- objects are closed (`schema_objects`); `unevaluatedProperties: false` then says nothing more
- `propertyNames` with a list of names or a pattern is written as properties
- a `format` that llguidance does not check is an annotation, as JSON Schema has it: it is removed, with a note
- a keyword that llguidance does not have is refused; with `"x-guidance": {"lenient": true}` at the top it is removed,
  with a note. Where a value makes it say nothing (`uniqueItems: false`), it is removed
- `pattern` and the names of `patternProperties` read Perl classes as ASCII (`ascii_classes`)
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from localq.text.ascii_classes import ascii_classes
from localq.text.schema_objects import close_objects, resolve

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)  # that llguidance checks
# Keywords with a schema, a list of schemas, or a name -> schema table.
_ONE = (
    *("additionalProperties", "additionalItems", "items", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Keywords that llguidance does not have, and values with which they say nothing.
_EMPTY: tuple[Any, ...] = (True, {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "not": (False,),
    "uniqueItems": (False,),
    "contains": (),
    "minContains": (),
    "maxContains": (),
    "propertyNames": _EMPTY,
    "if": (),
    "then": _EMPTY,
    "else": _EMPTY,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "unevaluatedProperties": _EMPTY,
    "unevaluatedItems": _EMPTY,
    "$dynamicRef": (),
    "$dynamicAnchor": (),
    "$recursiveRef": (),
    "$recursiveAnchor": (False,),
}
_ANNOTATIONS = ("title", "description", "examples", "default", "$comment")
_WITHOUT = {"minContains": "contains", "maxContains": "contains", "then": "if", "else": "if"}  # nothing without these


class UnsupportedKeyword(Exception):
    """A keyword that cannot be enforced. keyword, path: which and where, as a JSON pointer such as "#/properties/a"."""

    def __init__(self, keyword: str, path: str) -> None:
        super().__init__(keyword, path)
        self.keyword, self.path = keyword, path


@dataclass(frozen=True)
class PreparedSchema:
    """A schema for llguidance, and notes about what of the original it does not enforce."""

    schema: Any
    notes: tuple[str, ...]


def prepare(schema: Any) -> PreparedSchema:
    """The schema for llguidance. Raises UnsupportedKeyword, and RecursionError for one that is nested too deeply."""
    schema, found = copy.deepcopy(schema), _Found(_is_lenient(schema))
    for path, node in _nodes(schema):
        _translate_names(schema, node)
        found.visit(path, node)
    return PreparedSchema(close_objects(schema), tuple(found.notes()))


def one_of_note(schema: Any) -> str:
    """The note for a schema whose `oneOf` is read as `anyOf`."""
    return f'"oneOf" ({_places([path for path, node in _nodes(schema) if "oneOf" in node])}) is treated as "anyOf"'


class _Found:
    """Record of what is removed from a schema: format or keyword -> where."""

    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.formats: dict[str, list[str]] = {}
        self.keywords: dict[str, list[str]] = {}

    def visit(self, path: str, node: dict[str, Any]) -> None:
        """Clean one schema in place."""
        _translate_unevaluated(node)
        for keyword in [each for each in UNSUPPORTED if each in node]:
            says = not (_is_one_of(node[keyword], UNSUPPORTED[keyword]) or _WITHOUT.get(keyword, keyword) not in node)
            if says and not (keyword == "if" and not {"then", "else"} & node.keys()):
                if not self.lenient:
                    raise UnsupportedKeyword(keyword, path)
                self.keywords.setdefault(keyword, []).append(path)
        for keyword in UNSUPPORTED:
            node.pop(keyword, None)
        name = node.get("format")
        if isinstance(name, str) and name not in FORMATS:
            self.formats.setdefault(name, []).append(path)
            del node["format"]
        if isinstance(node.get("pattern"), str):
            node["pattern"] = ascii_classes(node["pattern"], True)
        if isinstance(node.get("patternProperties"), dict):
            named = {
                ascii_classes(each, spell_unicode=True): value for each, value in node["patternProperties"].items()
            }
            node["patternProperties"] = named

    def notes(self) -> Iterator[str]:
        """One line for each format and keyword."""
        for kind, found in (("format ", self.formats), ("", self.keywords)):
            for name, paths in found.items():
                yield f'{kind}"{name[:40]}" ({_places(paths)}) is not enforced'


def _nodes(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema that is an object, itself included, with its path: also those that only a reference leads to.

    A schema comes before the schemas in it, which the caller may change until then.
    """
    left: list[tuple[str, Any]] = [("#", schema)]
    seen: set[int] = set()
    while left:
        path, node = left.pop()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node
        inner = list(_inner(path, node))
        target = resolve(schema, node.get("$ref"))
        left += [*([] if target is None else [(node["$ref"], target)]), *inner[::-1]]


def _inner(path: str, node: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The schemas in a schema, with their paths."""
    for keyword in _ONE:
        if keyword in node:
            yield f"{path}/{keyword}", node[keyword]
    for keyword in _LISTS:
        if isinstance(node.get(keyword), list):
            yield from ((f"{path}/{keyword}/{number}", each) for number, each in enumerate(node[keyword]))
    for keyword in _TABLES:
        if isinstance(node.get(keyword), dict):
            yield from ((f"{path}/{keyword}/{_pointer(name)}", each) for name, each in node[keyword].items())


def _translate_names(schema: Any, node: dict[str, Any]) -> None:
    """`propertyNames` as properties or a pattern, where the object has no others: a table with an enum as key."""
    names = node.get("propertyNames")
    if isinstance(names, dict) and "$ref" in names and not names.keys() - {"$ref", *_ANNOTATIONS}:
        names = resolve(schema, names["$ref"])
    if not isinstance(names, dict) or {"properties", "patternProperties"} & node.keys():
        return
    said = names.keys() - {"type", *_ANNOTATIONS}
    value = node.get("additionalProperties", True)
    if said == {"pattern"} and isinstance(names["pattern"], str):
        node["patternProperties"] = {names["pattern"]: value}
    elif said == {"enum"} and isinstance(names["enum"], list):
        node["properties"] = {name: value for name in names["enum"] if isinstance(name, str)}
    else:
        return
    node["additionalProperties"] = False
    del node["propertyNames"]


def _translate_unevaluated(node: dict[str, Any]) -> None:
    """`unevaluatedProperties` and `unevaluatedItems` as keywords that llguidance has, where they mean the same."""
    is_alone = not {"allOf", "anyOf", "oneOf", "$ref"} & node.keys()
    for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if keyword in node and (is_alone or _is_one_of(node[keyword], _EMPTY)):
            node.setdefault(plain, node.pop(keyword))
    if node.get("unevaluatedProperties") is False:  # beside others: all of them are closed anyway
        del node["unevaluatedProperties"]


def _pointer(name: str) -> str:
    """A name as a JSON pointer has it."""
    return name[:60].replace("~", "~0").replace("/", "~1")


def _places(paths: list[str]) -> str:
    more = len(paths) - 1
    return f"at {paths[0][:120]}" + (f" and {more} more place{'' if more == 1 else 's'}" if more else "")


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


def _is_lenient(schema: Any) -> bool:
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    return isinstance(own, dict) and own.get("lenient") is True
