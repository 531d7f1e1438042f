"""Cost of opening a model, beyond what is on this machine: download, disk and time. Torch-free.

A model that is on this machine costs nothing, and that is decided without importing the planner (start-up time).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from localq import places
from localq.errors import LocalqError
from localq.files import format_facts
from localq.files.catalog import Source, Target
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.planner.consent import OpenCost
from localq.settings import Settings
from localq.wording import human_bytes

FILES_AT_ONCE = 10_000_000_000  # bytes of the two source files that quantizing by file keeps; the usual limit is 5 GB


def of(
    target: Target, settings: Settings, why: str = "", revision: str | None = None, *, again: bool = False
) -> OpenCost | None:
    """The cost of opening `target`; None if it is on this machine, or cannot be fetched offline.

    revision   the one to download instead, of which files may be here; its file list is requested
    again      it is on this machine, damaged, and is quantized again

    Raises LocalqError as `hub.fetch` for a repository outside the catalogue, whose file list is requested.
    """
    is_here = revision is None and not again and hub.local_path(target) is not None
    if settings.offline or hub_client.is_offline() or is_here:
        return None
    origin, size = _download(target) if revision is None else _download_at(target, revision)
    made = _made_bytes(target)
    folders = (places.hub_cache(), *([places.quantized_dir()] if made else []))
    return OpenCost(
        target.name, origin, size, size + made, _make_s(target), folders, _alternative(target, settings), why
    )


def of_all(targets: Sequence[Target], settings: Settings, why: str = "") -> OpenCost | None:
    """The cost of opening all `targets`, as `of`, the first of which `why` is about."""
    every = [of(target, settings, "" if number else why) for number, target in enumerate(targets)]
    costs = [each for each in every if each is not None]
    return functools.reduce(OpenCost.plus, costs) if costs else None


def of_quantizing(
    target: Target, format: str, out: Path, settings: Settings, *, keep_source: bool = False
) -> OpenCost | None:
    """The cost of `localq quantize`: of the download of its source, if any, and of the work.

    keep_source   a source that is calibrated file by file stays, as others do

    None for a source of unknown size, which quantizing reports. Raises as `of`.
    """
    from localq.planner import footprint, making, uncatalogued

    here = hub.local_path(target)
    if here is None and (settings.offline or hub_client.is_offline()):
        return None
    origin, size = (str(here), 0) if here is not None else _download(target)
    by_file = format_facts.writable()[format].made_from == "text" and not keep_source
    try:
        arch = target.entry.arch if target.entry is not None else uncatalogued.offer(target, offline=True).arch
        parameters = arch.parameters
        result = sum(footprint.weights_bytes(arch, format_facts.writable()[format].name).values())
    except LocalqError:  # a repository that is not here: from its bytes, which are mostly of 16-bit weights
        parameters, result = size // 2, size // 3
    if not parameters:
        return None
    folders = (out.absolute().parent, *([places.hub_cache()] if size and not by_file else []))
    kept = min(size, FILES_AT_ONCE) if by_file else size
    return OpenCost(
        f"{target.name} to {format}", origin, size, kept + result, making.seconds(format, parameters), folders
    )


def _download(target: Target) -> tuple[str, int]:
    """Return the origin of a target's files, and the bytes that are not here."""
    source = target.source or target.base
    if source is None:
        if target.repo is None:
            return target.name, 0
        return target.repo, _listed(hub.repo_source(target))
    size = 0 if hub.local_source(source) is not None else max(source.bytes - _begun(source), 0)
    return source.repo or source.package, size


def _download_at(target: Target, revision: str) -> tuple[str, int]:
    """As `_download`, of another revision of the repository."""
    source = target.source
    if source is None:
        source = hub.repo_source(target, revision)
    return source.repo, _listed(replace(source, revision=revision))


def _listed(source: Source) -> int:
    """Bytes to download from a repository at a revision of which the catalogue has no sizes."""
    from localq.files.hub import download
    from localq.files.hub import remote as hub_remote

    listing = hub_client.list_files(source.repo, source.revision)
    files = hub_remote.to_fetch(listing, source.files, source.choice)
    return sum(download.missing_bytes(listing, [each]) for each in files)


def _begun(source: Source) -> int:
    """Bytes of an interrupted download that are here."""
    from localq.files import local_models

    return sum(
        each.bytes
        for each in local_models.list_local(others=False)
        if not each.complete and source.repo and each.repo.casefold() == source.repo.casefold()
    )


def _make_s(target: Target) -> float | None:
    if target.source is not None or target.base is None or target.entry is None or target.format is None:
        return None
    from localq.planner import making

    if making.has_layers(target.entry.name, target.format):
        return making.READY_S
    return making.seconds(target.format, target.entry.arch.parameters)


def _made_bytes(target: Target) -> int:
    """Bytes of the weights that are quantized here; 0 if they are published."""
    if target.source is not None or target.base is None or target.entry is None or target.format is None:
        return 0
    from localq.planner import footprint

    return sum(footprint.weights_bytes(target.entry.arch, target.format).values())


def _alternative(target: Target, settings: Settings) -> str:
    """A format of the same model that is published and fits, where the asked one is quantized here."""
    if target.source is not None or target.base is None or target.entry is None:
        return ""
    from localq.planner import offers, room
    from localq.planner import plan as memory_plan
    from localq.planner.placement import Wishes

    budget = room.here(settings).budget
    if budget is None:  # of a GPU whose driver reports no memory
        return ""
    for offer in sorted(offers.of_entry(target.entry), key=lambda each: (each.last, -each.bits)):
        if offer.source is None or offer.unsupported:
            continue
        plan = memory_plan.assess(offer.arch, offer.format, budget, wishes=Wishes(), scheme=offer.scheme)
        if plan.fits:
            size = human_bytes(offer.source.bytes) if offer.source.bytes else "unknown size"
            return f"{offer.model}@{offer.format} (published, {size} to download)"
    return ""
