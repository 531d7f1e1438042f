"""The record of a conversion, `localq.json` in the folder of a model quantized here: from what it was made, and how.

`localq quantize` writes it and `localq push` reads it. It holds no path of this machine: of files only their names.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localq import __version__
from localq.errors import bad_file
from localq.files import catalog, format_facts, gguf_choice, json_files, packaged_model
from localq.files.catalog import Source, Target
from localq.sanitize import sanitize

RECORD_NAME = "localq.json"
SCHEMA = 1
MAX_BYTES = 2**16
MAX_FIELD = 2000  # characters
_CACHED = re.compile(r"models--(?P<org>.+?)--(?P<name>.+)")  # folder of a repository in a cache of the hub


@dataclass(frozen=True)
class ConversionRecord:
    """How a model was made; "" for what is not known.

    source, repo, revision   the source, its repository (of an embedded model the original one) and its commit
    licence      of the source, as the catalogue states it
    command      the command without paths, and without --out
    calibration  the text, in words
    localq       the version that made it
    """

    source: str = ""
    repo: str = ""
    revision: str = ""
    licence: str = ""
    format: str = ""
    command: str = ""
    calibration: str = ""
    localq: str = __version__

    def to_bytes(self) -> bytes:
        """The content of `RECORD_NAME`."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1).encode() + b"\n"


def read(folder: Path) -> ConversionRecord | None:
    """The record in `folder`; None without one. Raises LocalqError (exit 8) for a damaged one."""
    path = json_files.inside(folder, RECORD_NAME)
    if path is None:
        return None
    body = json_files.read_object(path, MAX_BYTES)
    names = [each.name for each in dataclasses.fields(ConversionRecord)]
    found = {name: body.get(name, "") for name in names}
    if not all(isinstance(value, str) and len(value) <= MAX_FIELD for value in found.values()):
        raise bad_file(str(path), "the record of the conversion is malformed", "Quantize the model again.")
    return ConversionRecord(**{name: " ".join(sanitize(value).split()) for name, value in found.items()})


def describe(target: Target, path: Path, format: str, options: Sequence[str]) -> ConversionRecord:
    """The record of quantizing `target`, whose files are at `path`, to `format` with the `options` of the command."""
    repo, revision = _repo_of(target, path)
    embedded = packaged_model.source_of(path) or _embedded(target)
    licence = _licence_of(repo)
    if embedded is not None:
        repo, licence = _original(embedded), embedded.licence
    name = target.name
    if target.path is not None:
        name = packaged_model.name_of(embedded) if embedded is not None else repo or path.name
    source = repo or name
    if path.suffix.casefold() == gguf_choice.SUFFIX:
        source = f"{source} ({path.name})"
    words = ["localq", "quantize", name, "--format", format, *options]
    return ConversionRecord(source, repo, revision, licence, format, " ".join(map(_plain, words)))


def _embedded(target: Target) -> Source | None:
    return target.source if target.source is not None and target.source.kind == "pypi" else None


def _plain(word: str) -> str:
    """A word of a command line; quoted if a shell would split it."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else json.dumps(sanitize(word), ensure_ascii=False)


def _repo_of(target: Target, path: Path) -> tuple[str, str]:
    """Repository and commit of a model in a cache of the hub; those of `target` elsewhere, or empty."""
    parts = path.absolute().parts
    for number, part in enumerate(parts):
        if (found := _CACHED.fullmatch(part)) is not None:
            kind, commit = (*parts[number + 1 :], "", "")[:2]
            return f"{found['org']}/{found['name']}", commit if kind == "snapshots" else ""
    return target.repo or (target.source.repo if target.source is not None else ""), ""


def _licence_of(repo: str) -> str:
    """The licence that the catalogue states for this repository; "" for one that it does not have."""
    sources = (source for entry in catalog.load_catalogue() for source in entry.sources if source.repo)
    return next((each.licence for each in sources if each.repo.casefold() == repo.casefold()), "")


def _original(source: Source) -> str:
    """The repository of the model that a package embeds, as the catalogue has it; else empty."""
    entry = next((each for each in catalog.load_catalogue() if source in each.sources), None)
    known = entry.sources if entry is not None else ()
    return next((each.repo for each in known if each.repo and format_facts.FORMATS[each.format].full_precision), "")
