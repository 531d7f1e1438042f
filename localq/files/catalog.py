"""Model names on the command line, and their resolution. Torch-free, quick to import.

A name is, in this order:

1. a catalogue name or alias, in any case, with or without `@FORMAT` (or `:FORMAT`):
   `llama-3.1-8b`, `llama3.1:8b`, `llama-3.1-8b@nf4`;
2. a local path, if it looks like one (`./x`, `../x`, `/x`, `~/x`, `x/`, `x.gguf`, `x.safetensors`) or exists;
3. a GGUF model of another program, as `localq ls` lists it: `ollama/NAME:TAG`, `lm-studio/PUBLISHER/REPO/FILE`;
4. a hub repository: `org/repo`, `org/repo@REVISION`, with or without `hf.co/` or `https://huggingface.co/` before it;
   one GGUF model of it: `org/repo:TAG`, `org/repo/FILE.gguf`, `org/repo@REVISION:TAG`, or the address of the file;
5. the name of a model quantized here that the catalogue has no more, as `localq ls` lists it.

So a folder with the name of a model is written `./folder`, and a repository with the name of a path `hf.co/org/repo`.
The name of an existing file, folder or link never leaves this machine, and neither does that of a .gguf file in a
folder that exists. After a repository, `@` begins a revision and `:` a GGUF model (`:latest`: none), never a format.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

from localq import disk, gpus, places
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog_file, format_facts, gguf_choice
from localq.files.architecture import Architecture
from localq.files.catalog_file import ModelEntry, Source

__all__ = ["Architecture", "ModelEntry", "Source", "Target", "find", "load_catalogue", "resolve"]

_HUB_PREFIX = re.compile(r"^(https?://)?(www\.)?(huggingface\.co|hf\.co)/+", re.IGNORECASE)
_REPO = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$", re.ASCII)
_REPO_NAME = re.compile(  # and a GGUF model of it: a tag or file name after a colon, or a file after a slash
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[^:]+))?"
    r"(:(?P<choice>\w[\w.-]*(/\w[\w.-]*)?)|/(?P<file>(\w[\w.-]*/)?\w[\w.-]*\.gguf))?",
    re.ASCII | re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?P<repo>[^/]+/[^/]+)/(?P<kind>tree|blob|resolve)/(?P<revision>[^/]+)(/(?P<file>.+))?")
_SHIPPED = places.PACKAGE_DATA / "models.toml"
_STORES = ("ollama", "lm-studio")  # first words of names, as in `other_stores`
_SIZE = re.compile(r"(?<![0-9.])\d+(?:\.\d+)?[bm](?![a-z0-9])")


@dataclass(frozen=True)
class Target:
    """A resolved model name.

    name      canonical name, with `@format` unless it is the entry's default
    kind      "catalogue", "repo", "folder" or "gguf"
    entry     the entry of the catalogue, if any
    format    the requested format, or the entry's default; None if only the files state it
    choice    tag or file name of a GGUF model of `repo` (`gguf_choice`); empty: none is named
    store     the program whose file `path` is (`other_stores`); empty for the user's own
    source    the published weights; None if they are quantized here, and for folders, files and other repositories
    base      the full-precision source to quantize from, if there is no `source`
    path      the folder or .gguf file
    repo, revision   the repository; revision None = its default branch
    """

    name: str
    kind: str
    entry: ModelEntry | None = None
    format: str | None = None
    source: Source | None = None
    base: Source | None = None
    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    choice: str = ""
    store: str = ""


@functools.cache
def _shipped_entries() -> tuple[ModelEntry, ...]:
    return catalog_file.read(_SHIPPED)


def load_catalogue() -> tuple[ModelEntry, ...]:
    """The entries of the user's file, then the shipped ones.

    An entry of the user's file replaces the shipped one of the same name, and its aliases take precedence.
    """
    own = catalog_file.read(places.user_models_file())
    replaced = {entry.name.casefold() for entry in own}
    return (*own, *(entry for entry in _shipped_entries() if entry.name.casefold() not in replaced))


def is_repo(name: str) -> bool:
    """Return whether `name` has the form ORG/REPO."""
    return _REPO.fullmatch(name) is not None


def find(name: str) -> ModelEntry:
    """The entry of a catalogue name or alias without a format.

    Raises LocalqError (exit 4) with similar names.
    """
    entry = _lookup(name)
    if entry is None:
        raise _unknown(name)
    return entry


def resolve(name: str) -> Target:
    """Resolve `name` by the rules above.

    Raises LocalqError: exit 4 for an unknown name, 8 for a file of another kind.
    """
    try:
        return _resolve(name)
    except LocalqError as error:
        if error.exit_code != ExitCode.UNKNOWN_MODEL or (folder := _made_here(name.strip())) is None:
            raise
        return Target(folder.name, "folder", path=folder)


def _resolve(name: str) -> Target:
    name = name.strip()
    if not name:
        raise usage_error("model", "the name is empty", f"To list the available models, run {gpus.fit_command()}.")
    entry, format = _split(name)
    if entry is not None:
        return _catalogue_target(entry, format)
    hub_name, prefixed = _HUB_PREFIX.subn("", name)
    if not prefixed:
        try:
            path = _local_path(name)
            if path is not None:
                return _path_target(path)
            if (stored := _store_target(name)) is not None:
                return stored
        except (OSError, RuntimeError, ValueError) as error:  # too long, ~ of an unknown user, or a NUL
            why = f"not a valid path ({str(error)[:60]})"
            raise LocalqError(name[:80], why, "Check the name.", ExitCode.UNKNOWN_MODEL) from error
    if prefixed or ("/" in name and "://" not in name):
        return _repo_target(name, hub_name)
    raise _unknown(name)


def quantizable_formats(entry: ModelEntry) -> tuple[str, ...]:
    """The formats that NAME@FORMAT quantizes here if they are not published."""
    base = entry.source(entry.base_format)
    if base is None:
        return ()
    made = [each for each in format_facts.FORMATS.values() if each.made_by_name]
    if entry.arch.experts:
        made = [each for each in made if each.made_of_mixtures]
    if format_facts.FORMATS[base.format].experts_only:  # its other matrices are in 16 bit
        made = [each for each in made if each.keeps_experts]
    return tuple(each.name for each in made if format_facts.why_unsupported(entry.arch, each.name) is None)


def _lookup(name: str) -> ModelEntry | None:
    """The entry of `load_catalogue` with this name, else with this alias."""
    wanted = name.casefold()
    own = {entry.name.casefold(): entry for entry in catalog_file.read(places.user_models_file())}
    shipped = catalog_file.read_shipped(_SHIPPED, wanted)
    if shipped is not None and shipped.name.casefold() in own:
        shipped = None
    if wanted in own:
        return own[wanted]
    if shipped is not None and shipped.name.casefold() == wanted:
        return shipped
    by_alias = (each for each in own.values() if any(alias.casefold() == wanted for alias in each.aliases))
    return next(by_alias, shipped)


def _split(name: str) -> tuple[ModelEntry | None, str | None]:
    """(entry, requested format) of a catalogue name; (None, None) for any other name."""
    if (entry := _lookup(name)) is not None:
        return entry, None
    stem, mark, suffix = name.rpartition("@")
    if mark and (entry := _lookup(stem)) is not None:
        if suffix.casefold() not in format_facts.FORMATS:
            raise _no_such_format(entry, suffix)
        return entry, suffix.casefold()
    stem, mark, suffix = name.rpartition(":")
    if mark and suffix.casefold() in (*format_facts.FORMATS, "latest") and (entry := _lookup(stem)) is not None:
        return entry, None if suffix.casefold() == "latest" else suffix.casefold()
    return None, None


def _catalogue_target(entry: ModelEntry, asked: str | None) -> Target:
    format = asked or entry.default_format
    source = entry.source(format)
    if source is None and format_facts.FORMATS[format].full_precision:
        # bf16 and fp16 both mean full precision: take the type that is published.
        source = next((found for each in format_facts.full_precision() if (found := entry.source(each))), None)
        format = source.format if source else format
    name = entry.name if format == entry.default_format else f"{entry.name}@{format}"
    if source is not None:
        return Target(name, "catalogue", entry, format, source)
    base = entry.source(entry.base_format)
    if format not in quantizable_formats(entry) or base is None:
        raise _no_such_format(entry, format)
    return Target(name, "catalogue", entry, format, None, base)


def _no_such_format(entry: ModelEntry, format: str) -> LocalqError:
    formats = dict.fromkeys((*(source.format for source in entry.sources), *quantizable_formats(entry)))
    offers = ", ".join(f"{entry.name}@{each}" for each in formats)
    why = f"no {format!r} weights are published, and localq cannot quantize to this format"
    known = format_facts.FORMATS.get(format)
    if entry.arch.traits.interleaved_experts and known is not None and known.made_from == "text":
        why += f": {format_facts.NO_SEARCH_OF_EXPERTS}"
    return LocalqError(entry.name, why, f"Available: {offers}.", ExitCode.UNKNOWN_MODEL)


def _local_path(name: str) -> Path | None:
    """The path that `name` means by its form or because something of this name exists; None otherwise."""
    path = places.expand(name)
    looks = name.startswith(("./", "../", "/", "~")) or name in (".", "..") or name.endswith("/")
    if looks or os.path.lexists(path):
        return path
    if not name.casefold().endswith((".gguf", ".safetensors")):
        return None
    hub_file = _REPO_NAME.fullmatch(name)
    is_choice = hub_file is not None and bool(hub_file["choice"] or hub_file["file"])
    elsewhere = is_choice or name.partition("/")[0].casefold() in _STORES
    return None if elsewhere and not os.path.lexists(path.parts[0]) else path


def _store_target(name: str) -> Target | None:
    """The model of another program that `name` means by its form. Raises LocalqError as `other_stores.find`."""
    if name.partition("/")[0].casefold() not in _STORES:
        return None
    from localq.files import other_stores  # start-up cost: only these names need them

    if not other_stores.store_of(name):
        return None
    found = other_stores.find(name)
    return Target(found.name, "gguf", format="gguf", path=found.path, store=found.store)


def _made_here(name: str) -> Path | None:
    """The folder of the model quantized here that is listed by this name; opening it says what it lacks."""
    try:
        made = {each.name.casefold(): each for each in places.quantized_dir().iterdir()}
        found = made.get(name.casefold())
        return found if found is not None and (found / "config.json").is_file() else None
    except OSError:  # there are none, or `localq ls` says that they cannot be read
        return None


def _path_target(path: Path) -> Target:
    if path.suffix.casefold() == ".gguf" and path.is_file():
        return Target(path.name, "gguf", format="gguf", path=path)
    if path.is_dir():
        return Target(disk.resolve(path).name, "folder", path=path)
    from localq.files import model_folder  # start-up cost: only other files and wrong paths need it

    if model_folder.is_gguf(path):
        return Target(path.name, "gguf", format="gguf", path=path)
    raise model_folder.no_model_error(path)


def _plain_name(hub_name: str) -> str:
    """The name of a repository, or of a file in it, from the address that a browser shows."""
    hub_name = hub_name.partition("?")[0].rstrip("/")
    address = _ADDRESS.fullmatch(hub_name)
    if address is None:
        return hub_name
    if address["kind"] == "tree":
        return f"{address['repo']}@{hub_name.partition('/tree/')[2]}"
    revision = "" if address["revision"] == "main" else f"@{address['revision']}"
    return f"{address['repo']}{revision}:{address['file'] or ''}"


def _repo_target(name: str, hub_name: str) -> Target:
    found = _REPO_NAME.fullmatch(_plain_name(hub_name))
    if found is None:
        why, step = "not a known model, path or hub repository", "Use ORG/REPO, ORG/REPO@REVISION or ORG/REPO:TAG."
        raise LocalqError(name, why, step, ExitCode.UNKNOWN_MODEL)
    repo, revision = found["repo"], found["revision"] or ""
    choice = gguf_choice.canonical(found["choice"] or found["file"] or "")
    if choice:
        shown = gguf_choice.name_of(repo, revision or None, choice)
        return Target(shown, "repo", format="gguf", repo=repo, revision=revision or None, choice=choice)
    for entry in load_catalogue():
        for source in entry.sources:
            if source.repo.casefold() == repo.casefold() and revision in ("", source.revision):
                return Target(repo, "repo", entry, source.format, source, repo=repo, revision=source.revision)
    shown = f"{repo}@{revision}" if revision else repo
    return Target(shown, "repo", repo=repo, revision=revision or None)


def _unknown(name: str) -> LocalqError:
    near = nearest(name)
    hint = (
        f"Did you mean {' or '.join(near)}?"
        if near
        else f"To list the available models, run {gpus.fit_command()}; for a Hugging Face repository, use ORG/REPO."
    )
    return LocalqError(name, "unknown model", hint, ExitCode.UNKNOWN_MODEL)


def nearest(name: str, count: int = 3) -> list[str]:
    """Up to `count` catalogue names similar to `name`, best first."""
    import difflib  # start-up cost: only misspelt names need it

    wanted = name.casefold().partition("@")[0]
    scores: dict[str, float] = {}
    for entry in load_catalogue():
        for known in (entry.name, *entry.aliases):
            score = difflib.SequenceMatcher(None, wanted, known.casefold()).ratio()
            if set(_SIZE.findall(wanted)) & set(_SIZE.findall(known.casefold())):
                score += 0.1  # the same size weighs more than similar letters
            scores[entry.name] = max(scores.get(entry.name, 0.0), score)
    good = [each for each in scores if scores[each] >= 0.6]
    return sorted(good, key=lambda each: -scores[each])[:count]
