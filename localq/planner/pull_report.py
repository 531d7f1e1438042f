"""The report of `localq pull --dry-run`: files, sizes, origin, and whether the model fits.

Requests the file list of a repository and the index of its weights; leaves nothing on the disk. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from localq import disk, gpus, places
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import packaged_model
from localq.files.catalog import Source, Target
from localq.files.hub import client as hub_client
from localq.files.hub import download
from localq.files.hub import errors as hub_errors
from localq.files.hub import fetch as hub
from localq.files.hub import remote as hub_remote
from localq.planner import choose, making, offers, prepare, room, uncatalogued
from localq.planner import plan as memory_plan
from localq.planner.offers import Offer
from localq.planner.plan import Plan
from localq.planner.ram import Ram
from localq.settings import Settings
from localq.wording import human_bytes, table_lines

MIB = 2**20


def choose_target(name: str, settings: Settings) -> tuple[Target, str | None]:
    """The target of `name`, as for `localq chat`; and the reason, if its format is not the default.

    Raises LocalqError as `choose.choose_target`.
    """
    target, choice = choose.choose_target(name, None, settings, room.planned(settings).budget)
    unusual = choice is not None and not choice.taken.offer.preferred and target.name != name
    return target, f"{target.name}: {choice.why}" if choice is not None and unusual else None


def _offer(target: Target, revision: str | None) -> Offer | None:
    """The offer of `target` before its download; None if the catalogue does not have it in this format."""
    if target.entry is None:
        return (
            uncatalogued.offer(target, offline=False)
            if revision is None
            else uncatalogued.remote(target, revision=revision)
        )
    return next(iter(offers.of_entry(target.entry, target.format)), None)


@dataclass(frozen=True)
class Verdict:
    """Fit of a model (None: unknown), and as text; refusal: the error (exit 3 or 2) instead of a download."""

    fits: bool | None
    text: str
    refusal: LocalqError | None = None


def verdict(target: Target, settings: Settings, revision: str | None, *, force: bool) -> Verdict | None:
    """The verdict about `target`; None for an unknown shape.

    Refuses a model that does not fit, unless `force`.

    Raises LocalqError: exit 8 for damaged files, unless `force`; 4, 5, 6 and 9 as `hub.fetch`.
    """
    memory = room.planned(settings)  # checks --vram before the first request
    budget = memory.budget
    try:
        offer = _offer(target, revision)
    except LocalqError as error:
        if error.exit_code != ExitCode.FAILURE and not (force and error.exit_code == ExitCode.BAD_FILE):
            raise  # an unsupported model may be downloaded for another tool
        return Verdict(None, f"{target.name}: cannot determine whether it fits ({error.why}); downloading it anyway")
    if offer is None:
        return None
    if offer.unsupported:
        return Verdict(None, f"{target.name}: {offer.unsupported}; downloading it anyway")
    try:
        plan = memory_plan.assess(
            offer.arch, offer.format, budget, wishes=choose.wishes_of(settings), weights=offer.block_bytes,
            scheme=offer.scheme, name=target.name,
        )  # fmt: skip
    except LocalqError as error:  # a setting that this shape does not support
        return Verdict(False, f"{target.name}: {error.why}", None if force else error)
    if plan.fits or force:
        return Verdict(plan.fits, f"{target.name}: {_fit_text(plan, memory)}")
    why = f"does not fit: {plan.reason}"
    refused = choose.too_large(offer, budget, settings)
    ways = f" {refused.next_step}" if refused is not None else ""
    listed = f"{gpus.fit_command()} lists the models that fit; " if isinstance(budget, int) else ""
    step = f"{listed}--force downloads {'this one' if listed else 'it'} anyway.{ways}"
    return Verdict(False, f"{target.name}: {why}", LocalqError(target.name, why, step, ExitCode.DOES_NOT_FIT))


def _fit_text(plan: Plan, memory: room.Room) -> str:
    if not plan.fits:
        return f"does not fit ({plan.reason}); downloading it anyway"
    budget, context = memory.budget, f"for {plan.ctx:,} tokens of context"
    if isinstance(budget, Ram):
        needed, free = human_bytes(plan.ledger.total), human_bytes(budget.bytes)
        return f"fits: needs {needed} of RAM {context}, and {free} is free (on the CPU, in {budget.dtype})"
    total = f"{plan.ledger.total / MIB:,.0f}"
    if budget is None:
        return f"needs {total} MiB of GPU memory {context}"
    saved = f" ({plan.choice})" if plan.choice else ""
    kept = (
        f"; assumes that all of the card's memory is free{room.desktop_text(memory.desktop, True)}"
        if memory.is_assumed
        else ""
    )
    return f"fits: needs {total} of {budget / MIB:,.0f} MiB {context}{saved}{kept}"


@dataclass(frozen=True)
class File:
    """A file of a model: its bytes, and how many of them must be downloaded."""

    name: str
    bytes: int
    fetch_bytes: int


@dataclass(frozen=True)
class PullPlan:
    """Plan for pulling `target`.

    origin   the repository or index, or the path of a complete model; commit: of a repository
    files    in the order of the list
    made     the format that is then quantized here, and the time; empty if none is
    verdict  None for an unknown shape
    refusal  the error that pulling would end with before the download; None if it would not
    """

    target: Target
    origin: str
    commit: str | None
    files: tuple[File, ...]
    made: str
    verdict: Verdict | None
    refusal: LocalqError | None

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.bytes for each in self.files)

    @property
    def fetch_bytes(self) -> int:
        """Bytes to download."""
        return sum(each.fetch_bytes for each in self.files)


def plan_pull(target: Target, settings: Settings, revision: str | None, *, force: bool) -> PullPlan:
    """Plan the pull of a model.

    Raises LocalqError as pulling would, except for a model that does not fit, and for a full disk.
    """
    offline = settings.offline or hub_client.is_offline()
    here = hub.local_path(target) if revision is None else None
    made = ""
    if here is not None:
        files = tuple(File(each.name, each.stat().st_size, 0) for each in hub.read_files(here))
        origin, commit = str(here), None
    else:
        source, made = _source(target, revision)
        origin, commit, files = _remote(source, offline)
    judged = verdict(target, settings, revision, force=force)
    refusal = judged.refusal if judged is not None and here is None else None  # a model that is here is not refused
    return PullPlan(target, origin, commit, files, made, judged, refusal or _no_room(target, files))


def _source(target: Target, revision: str | None) -> tuple[Source, str]:
    """The source to download, and the format that is then quantized here."""
    if target.source is None and target.repo is None:
        if target.base is None or target.format is None or target.entry is None:
            raise bad_file(target.name, "there are no weights to download or quantize")
        if prepare.ready_layers(target) is not None:
            return target.base, f"to {target.format} in a few seconds, using the quantized layers included with localq"
        prepare.check_can_make(target.format)
        time = making.estimate(target.format, target.entry.arch.parameters)
        return target.base, f"to {target.format} on this machine in {time} (estimated)"
    if target.source is not None and revision is None:
        return target.source, ""
    if target.source is None:
        return hub.repo_source(target, revision), ""
    revision = revision or target.revision or "main"
    return Source(format="", repo=target.source.repo, revision=revision, files=target.source.files), ""


def _remote(source: Source, offline: bool) -> tuple[str, str | None, tuple[File, ...]]:
    """(origin, commit, files) of a source that is not complete here."""
    if source.kind == "pypi":
        name = PurePosixPath(source.member).name
        if packaged_model.local_path(source) is not None or packaged_model.installed_path(source) is not None:
            return f"{source.package} {source.version}, already installed", None, (File(name, source.bytes, 0),)
        if offline:
            raise hub.not_here(source.package)
        index = f"{source.package} {source.version} from the package index"
        return index, None, (File(name, source.bytes, source.bytes),)
    if offline:
        raise hub.offline_error(source)
    if source.gated and not hub_client.has_token():
        raise hub_errors.gated_error(source.repo)
    listing = hub_client.list_files(source.repo, source.revision)
    if listing.gated and not hub_client.has_token():
        raise hub_errors.gated_error(listing.repo)
    found = hub_remote.to_fetch(listing, source.files, source.choice)
    for each in found:
        hub.check_recorded_hash(listing.repo, each, source.sha256)
    files = (File(each.name, each.size, download.missing_bytes(listing, [each])) for each in found)
    return f"{listing.repo} at {listing.commit}", listing.commit, tuple(files)


def _no_room(target: Target, files: tuple[File, ...]) -> LocalqError | None:
    try:
        disk.check_free(places.hub_cache(), sum(each.fetch_bytes for each in files), target.name)
    except LocalqError as error:
        return error
    return None


def lines(plan: PullPlan) -> list[str]:
    """The plan as lines for people."""
    rows = [[each.name, human_bytes(each.bytes), _coming(each)] for each in plan.files]
    rows.append(["total", human_bytes(plan.bytes), human_bytes(plan.fetch_bytes)])
    found = [
        f"{plan.target.name}: {plan.origin}",
        *table_lines(["FILE", "SIZE", "TO DOWNLOAD"], rows, frozenset({1, 2})),
    ]
    if plan.made:
        found.append(f"then quantized {plan.made}")
    return [*found, *([plan.verdict.text] if plan.verdict else [])]


def _coming(file: File) -> str:
    return human_bytes(file.fetch_bytes) if file.fetch_bytes else "-"


def to_dict(plan: PullPlan) -> dict[str, Any]:
    """The form of `--json`; sizes in bytes."""
    return {
        "name": plan.target.name,
        "format": plan.target.format,
        "origin": plan.origin,
        "commit": plan.commit,
        "files": [{"name": each.name, "bytes": each.bytes, "fetch_bytes": each.fetch_bytes} for each in plan.files],
        "bytes": plan.bytes,
        "fetch_bytes": plan.fetch_bytes,
        "made_here": plan.made or None,
        "fits": plan.verdict.fits if plan.verdict else None,
        "verdict": plan.verdict.text if plan.verdict else None,
        "refusal": plan.refusal.to_dict() if plan.refusal else None,
    }
