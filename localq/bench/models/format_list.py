"""`localq bench --formats MODEL`: in which formats MODEL is here, and how the others can be had. Torch-free.

A model of the catalogue has its published and made weights by NAME@FORMAT. Of any other (a folder, a .gguf file, a
repository) what `localq quantize` made is looked for in the folder NAME@FORMAT: beside a folder or file, and where
localq keeps what it makes. What is missing is made only where that was asked for; nothing but MODEL itself is fetched.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from localq import places
from localq.errors import LocalqError, usage_error
from localq.files import catalog, format_facts, stored_format
from localq.files.catalog import Target
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.model_folder import open_model
from localq.planner import prepare
from localq.planner.speed import local_measurements
from localq.wording import OnProgress, Say


@dataclass(frozen=True)
class Candidate:
    """A format and where its weights are.

    path       a folder or .gguf file; None where they are not here, or are random
    reason     why they are not here; "" where they are
    command    that makes or fetches them; "" where nothing does
    seconds    that quantizing took on this machine, where that is known
    folder     where it would be made of `base`; None where it is not
    made_as    NAME@FORMAT of the catalogue where that makes it: there may be more to its way (layers that come with
               localq); "" where the weights of `base` are all there is to it
    failed     making it ended as it should not
    """

    format: str
    path: Path | None = None
    reason: str = ""
    command: str = ""
    seconds: float | None = None
    folder: Path | None = None
    made_as: str = ""
    failed: bool = False


@dataclass(frozen=True)
class FormatCandidates:
    """A model: its name, the best weights of it that are here, and every format."""

    name: str
    base: Path
    candidates: tuple[Candidate, ...]


def names() -> list[str]:
    """The rows of the table: every quantized format, and what `localq quantize` calls a variant of one."""
    quantized = (each for each in format_facts.FORMATS.values() if each.is_quantized)
    return [name for each in quantized for name in filter(None, (each.name, each.quantize_name))]


def random() -> tuple[Candidate, ...]:
    """What random weights may be made in: all that is not the same as another."""
    return tuple(Candidate(each.name) for each in format_facts.FORMATS.values() if each.is_quantized)


def find(name: str, say: Say, on_progress: OnProgress | None, offline: bool) -> FormatCandidates:
    """The formats of the model `name`. Its own weights are fetched if need be; raises as `prepare.source_path` does."""
    target = catalog.resolve(name)
    base = _full_precision(target) or prepare.model_path(target, say, on_progress, offline)
    if target.entry:
        return FormatCandidates(target.entry.name, base, tuple(_candidate(format, target, base) for format in names()))
    with contextlib.suppress(LocalqError):  # of what cannot be read every line says why
        own = stored_format.format_of_config(open_model(base).config)
        candidates = (Candidate(each, base) if each == own else _candidate(each, target, base) for each in names())
        return FormatCandidates(target.name, base, tuple(candidates))
    return FormatCandidates(target.name, base, tuple(_candidate(format, target, base) for format in names()))


def to_make(words: str) -> tuple[str, ...]:
    """Of `--make`: names with commas between, or "all". Raises LocalqError (exit 2) for what is not made here."""
    made = format_facts.writable()
    named = tuple(made) if words == "all" else tuple(filter(None, words.split(",")))
    for format in named:
        if format not in made:
            raise usage_error("--make", f"{format[:40]!r} is not made here", f"Use {', '.join(made)}, or all.")
    return named


def make(
    found: FormatCandidates, wanted: Sequence[str], say: Say, on_progress: OnProgress | None, offline: bool
) -> FormatCandidates:
    """The same, with the formats `wanted` made where they are missing; what cannot be made has the reason."""
    made = (
        _made(each, found, say, on_progress, offline) if each.format in wanted else each for each in found.candidates
    )
    return replace(found, candidates=tuple(made))


def _full_precision(target: Target) -> Path | None:
    """Weights of a catalogued model that others are made from, if they are here: the reference of all."""
    if target.entry is None:
        return None
    for format in (*format_facts.full_precision(), target.entry.base_format):
        source = target.entry.source(format)
        if source is not None and (path := hub.local_source(source)) is not None:
            return path
    return None


def _candidate(format: str, target: Target, base: Path) -> Candidate:
    if target.entry is not None and target.entry.source(format) is not None:
        command = f"localq pull {target.entry.name}@{format}"
        path = hub.local_path(catalog.resolve(f"{target.entry.name}@{format}"))
        return Candidate(format, path, "" if path else "not fetched", command)
    if format not in format_facts.writable():
        return Candidate(format, reason="nobody publishes it, as far as the catalogue knows" if target.entry else
                         "localq does not write it")  # fmt: skip
    folder = _folder(format, target)
    made = folder if hub_cache.is_complete(folder) else None
    command = shlex.join(["localq", "quantize", str(base), "--format", format, "--out", str(folder)])
    seconds = local_measurements.quantizing(folder) if made else None
    listed = target.entry is not None and format in catalog.made_formats(target.entry)
    made_as = f"{target.entry.name}@{format}" if target.entry is not None and listed else ""
    return Candidate(format, made, "" if made else "not made", command, seconds, folder, made_as)


def _folder(format: str, target: Target) -> Path:
    if target.path is not None:
        whole = target.path.absolute()
        return whole.with_name(f"{whole.name}@{format}")
    name = target.entry.name if target.entry else target.name.replace("/", "--")
    return places.quantized_dir() / f"{name}@{format}"


def _made(
    each: Candidate, found: FormatCandidates, say: Say, on_progress: OnProgress | None, offline: bool
) -> Candidate:
    if each.path is not None or each.folder is None:
        return each
    target = catalog.resolve(each.made_as) if each.made_as else None
    timed = not each.folder.exists() and (target is None or _is_all_work(target))
    started = time.monotonic()
    try:
        if target is not None:
            path = prepare.model_path(target, say, on_progress, offline)
        else:
            prepare.check_can_make(each.format)
            say(f"{found.name}@{each.format}: made here once, in {each.folder}")
            prepare.quantize(f"{found.name}@{each.format}", found.base, each.format, each.folder, on_progress)
            path = each.folder
    except LocalqError as error:
        return replace(each, reason=str(error))
    except Exception as error:  # a defect of one format ends no other
        return replace(each, reason=defect(error), failed=True)
    seconds = time.monotonic() - started if timed else None
    if seconds is not None:
        local_measurements.keep_quantizing(each.folder, seconds)
    return replace(each, path=path, reason="", seconds=seconds)


def _is_all_work(target: Target) -> bool:
    """Neither fetching nor layers that come with localq are part of making it: what goes on is not timed either."""
    return target.base is not None and hub.local_source(target.base) is not None and not prepare.ready_layers(target)


def defect(error: Exception) -> str:
    """What should not have failed, in one line."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return f"{type(error).__name__}: {first}"
