"""Formats for `localq bench --formats MODEL`: which are on this machine, and how to get the others. Torch-free.

A catalogued model has published and quantized weights under NAME@FORMAT. For any other (a folder, a .gguf file, a
repository) the results of `localq quantize` are searched in the folder NAME@FORMAT, beside the folder or file and in
localq's own folder. Missing formats are quantized only on request; only MODEL itself is fetched.
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
from localq.files import catalog, format_facts, stored_format, verification
from localq.files.catalog import Target
from localq.files.hub import cache as hub_cache
from localq.files.hub import fetch as hub
from localq.files.model_folder import open_model
from localq.planner import prepare
from localq.planner.speed import local_measurements
from localq.wording import OnProgress, Say


@dataclass(frozen=True)
class Candidate:
    """A format and its weights.

    path       a folder or .gguf file; None where they are missing, or random
    reason     why they are missing; "" where they are here
    command    that makes or fetches them; "" without one
    seconds    of quantizing on this machine, where known
    folder     of the quantized model; None where localq cannot make it
    made_as    NAME@FORMAT of the catalogue where localq makes it by name (it may use packaged layers); "" where it is
               made from the weights of `base`
    failed     quantizing ended with an unexpected error
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
    """A model, its best weights on this machine, and all its formats."""

    name: str
    base: Path
    candidates: tuple[Candidate, ...]


def names() -> list[str]:
    """Return the rows of the table: every quantized format, and the variants that `localq quantize` names."""
    quantized = (each for each in format_facts.FORMATS.values() if each.is_quantized)
    return [name for each in quantized for name in filter(None, (each.name, each.quantize_name))]


def random() -> tuple[Candidate, ...]:
    """Return the formats for random weights: all distinct quantized ones."""
    return tuple(Candidate(each.name) for each in format_facts.FORMATS.values() if each.is_quantized)


def find(name: str, say: Say, on_progress: OnProgress | None, offline: bool) -> FormatCandidates:
    """Find the formats of the model `name`; fetches its weights if needed; raises as `prepare.source_path` does."""
    found = _find(catalog.resolve(name), say, on_progress, offline)
    checked = (_without_damage(each, found.base, on_progress) for each in found.candidates)
    return replace(found, candidates=tuple(checked))


def _find(target: Target, say: Say, on_progress: OnProgress | None, offline: bool) -> FormatCandidates:
    base = _full_precision(target, on_progress, offline) or prepare.model_path(target, say, on_progress, offline)
    if target.entry:
        return FormatCandidates(target.entry.name, base, tuple(_candidate(format, target, base) for format in names()))
    with contextlib.suppress(LocalqError):  # for unreadable weights every row shows the reason
        own = stored_format.format_of_config(open_model(base).config)
        candidates = (Candidate(each, base) if each == own else _candidate(each, target, base) for each in names())
        return FormatCandidates(target.name, base, tuple(candidates))
    return FormatCandidates(target.name, base, tuple(_candidate(format, target, base) for format in names()))


def _without_damage(each: Candidate, base: Path, on_progress: OnProgress | None) -> Candidate:
    """The candidate, without its weights if one of their files is damaged."""
    if each.path is None or each.path == base:  # that of `base` was checked when it was found
        return each
    try:
        verification.refuse_damaged(each.path, each.path.name, on_progress)
    except LocalqError as error:
        return replace(each, path=None, reason=str(error), folder=None)
    return each


def to_make(words: str) -> tuple[str, ...]:
    """Parse `--make`: comma-separated names, or "all". Raises LocalqError (exit 2) for other formats."""
    made = format_facts.writable()
    named = tuple(made) if words == "all" else tuple(filter(None, words.split(",")))
    for format in named:
        if format not in made:
            raise usage_error("--make", f"localq cannot quantize to {format[:40]!r}", f"Use {', '.join(made)}, or all.")
    return named


def make(
    found: FormatCandidates, wanted: Sequence[str], say: Say, on_progress: OnProgress | None, offline: bool
) -> FormatCandidates:
    """Quantize the missing formats among `wanted`; a failure is recorded as the reason."""
    made = (
        _made(each, found, say, on_progress, offline) if each.format in wanted else each for each in found.candidates
    )
    return replace(found, candidates=tuple(made))


def _full_precision(target: Target, on_progress: OnProgress | None, offline: bool) -> Path | None:
    """Return the full-precision weights of a catalogued model, if they are here: the reference for all formats.

    Raises LocalqError as `hub.fetch`, for damaged ones.
    """
    if target.entry is None:
        return None
    for format in (*format_facts.full_precision(), target.entry.base_format):
        source = target.entry.source(format)
        if source is not None and hub.local_source(source) is not None:
            return hub.fetch(source, on_progress, offline)
    return None


def _candidate(format: str, target: Target, base: Path) -> Candidate:
    if target.entry is not None and target.entry.source(format) is not None:
        command = f"localq pull {target.entry.name}@{format}"
        path = hub.local_path(catalog.resolve(f"{target.entry.name}@{format}"))
        return Candidate(format, path, "" if path else "not downloaded", command)
    if format not in format_facts.writable():
        return Candidate(format, reason="not in the catalogue" if target.entry else
                         "localq cannot quantize to this format")  # fmt: skip
    folder = _folder(format, target)
    made = folder if hub_cache.is_complete(folder) else None
    command = shlex.join(["localq", "quantize", str(base), "--format", format, "--out", str(folder)])
    seconds = local_measurements.quantizing(folder) if made else None
    listed = target.entry is not None and format in catalog.quantizable_formats(target.entry)
    made_as = f"{target.entry.name}@{format}" if target.entry is not None and listed else ""
    return Candidate(format, made, "" if made else "not quantized yet", command, seconds, folder, made_as)


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
            say(f"creating {found.name}@{each.format} in {each.folder} (only needed once)")
            prepare.quantize(f"{found.name}@{each.format}", found.base, each.format, each.folder, on_progress)
            path = each.folder
    except LocalqError as error:
        return replace(each, reason=str(error))
    except Exception as error:  # a defect of one format must not stop the others
        return replace(each, reason=defect(error), failed=True)
    seconds = time.monotonic() - started if timed else None
    if seconds is not None:
        local_measurements.keep_quantizing(each.folder, seconds)
    return replace(each, path=path, reason="", seconds=seconds)


def _is_all_work(target: Target) -> bool:
    """True where quantizing needs no download and no packaged layers, so that its time is the whole work."""
    return target.base is not None and hub.local_source(target.base) is not None and not prepare.ready_layers(target)


def defect(error: Exception) -> str:
    """Return an unexpected error in one line."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return f"{type(error).__name__}: {first}"
