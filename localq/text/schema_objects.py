"""Objects of a JSON schema, closed: only the properties that the schema names, unless it says otherwise.

JSON Schema lets an object have any further property; a model that may add properties often never ends. So a schema
with `properties` or `patternProperties` and without `additionalProperties` gets `additionalProperties: false`, as in
llama.cpp and OpenAI's strict mode. An object for which no property is named stays open.

Schemas that apply to one value together (`allOf`, a `$ref` with siblings, `anyOf` and `oneOf` beside `properties`) are
closed together: each of them admits the names of the others. Where one of them has `additionalProperties` other than
false, none is closed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_BRANCHES = ("anyOf", "oneOf")
_ONE = ("additionalProperties", "additionalItems", "items")
_LISTS = ("prefixItems", "items")
_TABLES = ("properties", "patternProperties", "$defs", "definitions")


@dataclass(frozen=True)
class _Names:
    """Properties and patterns that schemas name, in their order; is_open: one of them allows others too."""

    properties: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()
    is_open: bool = False


_NONE = _Names()


def close_objects(schema: Any) -> Any:
    """A copy of `schema` with its objects closed. Raises RecursionError for one that is nested too deeply."""
    if not isinstance(schema, dict):
        return schema
    return _Closing(schema).closed()


class _Closing:
    """One schema. variants: (reference, names of its siblings) -> name of a copy in `$defs` that admits them.

    added   these copies
    known   reference -> names of its schema
    done    ids of the schemas that are closed; led_to: references that may lead to others
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.original, self.schema = schema, copy.deepcopy(schema)
        self.variants: dict[tuple[str, frozenset[str], frozenset[str], bool], str] = {}
        self.added: dict[str, Any] = {}
        self.known: dict[str, _Names] = {}
        self.done: set[int] = set()
        self.led_to: list[str] = []

    def closed(self) -> dict[str, Any]:
        """The closed schema."""
        self._close(self.schema, _NONE)
        while self.led_to:  # schemas outside the keywords that hold schemas
            target = resolve(self.schema, self.led_to.pop())
            if target is not None and id(target) not in self.done:
                self._close(target, _NONE)
        if self.added:
            self.schema["$defs"] = {**self.schema.get("$defs", {}), **self.added}
        return self.schema

    def _close(self, node: Any, outside: _Names) -> None:
        """Close `node` in place. outside: names of the schemas that apply together with it."""
        if not isinstance(node, dict):
            return
        self.done.add(id(node))
        parts = [_own_names(node), *(self._names(each) for each in _list(node, "allOf"))]
        target = self._target(node.get("$ref"))
        if target is not None:
            parts.append(self._names_of(node["$ref"]))
        branches = {key: [self._names(each) for each in _list(node, key)] for key in _BRANCHES}
        together = _union([outside, *parts])
        everything = _union([together, *(each for names in branches.values() for each in names)])
        _close_own(node, everything)
        for each in _list(node, "allOf"):
            self._close(each, everything)
        for key, names in branches.items():
            others = _union([together, *(each for other in _BRANCHES if other != key for each in branches[other])])
            for each, own in zip(_list(node, key), names, strict=True):
                self._close(each, _union([others, own]))
        if target is not None and not _covers(parts[-1], everything):
            node["$ref"] = self._variant(str(node["$ref"]), target, everything)
        elif target is not None:
            self.led_to.append(node["$ref"])
        for each in _children(node):
            self._close(each, _NONE)

    def _variant(self, reference: str, target: dict[str, Any], outside: _Names) -> str:
        """A reference to a copy of `target` that admits the names `outside`."""
        key = (reference, frozenset(outside.properties), frozenset(outside.patterns), outside.is_open)
        name = self.variants.get(key)
        if name is None:
            name = f"localq-{len(self.variants)}"
            while name in self.original.get("$defs", {}):
                name += "-"
            self.variants[key] = name
            self.added[name] = made = copy.deepcopy(target)
            self._close(made, outside)
        return f"#/$defs/{name}"

    def _names(self, node: Any) -> _Names:
        """Names of all schemas that apply together in `node`."""
        found, targets = self._gather([node], follow=False)
        return _union([found, *(self._names_of(reference) for reference in targets)])

    def _names_of(self, reference: str) -> _Names:
        """Names of the schema that a reference leads to."""
        if reference not in self.known:
            self.known[reference], _ = self._gather([self._target(reference)], follow=True)
        return self.known[reference]

    def _gather(self, left: list[Any], follow: bool) -> tuple[_Names, list[str]]:
        """Names of schemas and of those that apply together with them, and references (follow: theirs too)."""
        found, seen, targets = [], set(), []
        while left:
            each = left.pop()
            if not isinstance(each, dict) or id(each) in seen:
                continue
            seen.add(id(each))
            found.append(_own_names(each))
            left += [*_list(each, "oneOf")[::-1], *_list(each, "anyOf")[::-1], *_list(each, "allOf")[::-1]]
            if self._target(each.get("$ref")) is not None:
                targets.append(each["$ref"])
                left += [self._target(each["$ref"])] if follow else []
        return _union(found), targets

    def _target(self, reference: Any) -> dict[str, Any] | None:
        """The schema in the original that a reference names; None for any other reference."""
        return resolve(self.original, reference)


def resolve(schema: Any, reference: Any) -> dict[str, Any] | None:
    """The schema within `schema` that a reference such as "#/$defs/a" names; None for any other reference."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    node = schema
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(node):
            node = node[int(part[:9])]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return None
    return node if isinstance(node, dict) else None


def _own_names(node: dict[str, Any]) -> _Names:
    named, patterns = node.get("properties"), node.get("patternProperties")
    required = node.get("required")
    properties = [*(named if isinstance(named, dict) else ())]
    properties += [each for each in required if isinstance(each, str)] if isinstance(required, list) else []
    is_open = node.get("additionalProperties", False) is not False
    return _Names(tuple(dict.fromkeys(properties)), tuple(patterns if isinstance(patterns, dict) else ()), is_open)


def _close_own(node: dict[str, Any], names: _Names) -> None:
    """Close the object of `node` itself, which admits `names`."""
    named, patterns = node.get("properties", {}), node.get("patternProperties", {})
    if not isinstance(named, dict) or not isinstance(patterns, dict) or not (named or patterns):
        return
    if names.is_open or "additionalProperties" in node:
        return
    node["additionalProperties"] = False
    if not patterns:  # else a required name may be one of a pattern's
        node["properties"] = {**named, **{name: True for name in names.properties if name not in named}}
    if patterns or names.patterns:
        node["patternProperties"] = {**patterns, **{name: True for name in names.patterns if name not in patterns}}


def _covers(own: _Names, wanted: _Names) -> bool:
    """Return whether a schema with the names `own` needs no other form beside schemas that name `wanted`."""
    return (
        set(wanted.properties) <= set(own.properties)
        and set(wanted.patterns) <= set(own.patterns)
        and wanted.is_open == own.is_open
    )


def _union(names: list[_Names]) -> _Names:
    return _Names(
        tuple(dict.fromkeys(name for each in names for name in each.properties)),
        tuple(dict.fromkeys(name for each in names for name in each.patterns)),
        any(each.is_open for each in names),
    )


def _list(node: dict[str, Any], key: str) -> list[Any]:
    found = node.get(key)
    return found if isinstance(found, list) else []


def _children(node: dict[str, Any]) -> Iterator[Any]:
    """Schemas inside `node` for other values than its own."""
    yield from (node[key] for key in _ONE if isinstance(node.get(key), dict))
    for key in _LISTS:
        yield from _list(node, key)
    for key in _TABLES:
        if isinstance(node.get(key), dict):
            yield from node[key].values()
