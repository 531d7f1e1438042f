"""Offers of the GGUF models of a repository, for a name that does not say which of them is meant.

Of a repository on the hub one header is read, that of the usual choice: the others have the same architecture, and
their weights are in proportion to their files. What is on this machine is read itself. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localq.errors import ExitCode, LocalqError
from localq.files import gguf_choice
from localq.files.catalog import Target
from localq.files.gguf.block_types import tag_has_kernel
from localq.files.gguf_choice import GgufChoice
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.files.hub import layout
from localq.files.hub.client import Listing
from localq.files.schemes import MIX
from localq.planner import footprint, uncatalogued
from localq.planner.offers import Offer

MOST_BITS = 15.0  # of a file in blocks; one of more is in 16 or 32 bit, of which a load makes 16-bit weights


@dataclass(frozen=True)
class GgufOffer:
    """A GGUF model of a repository: its bytes, and its offer; no offer, but `problem`, if localq cannot run it."""

    choice: GgufChoice
    bytes: int
    offer: Offer | None = None
    problem: str = ""


def models(target: Target, offline: bool, revision: str | None = None) -> list[GgufOffer]:
    """The GGUF models of a repository, the smallest first: those on the hub, or `offline` those on this machine.

    Raises LocalqError as `hub_client.list_files`.
    """
    assert target.repo is not None, "only a repository has several"
    revision = revision or target.revision
    if offline or hub_client.is_offline():
        found = _local(target, revision)
    else:
        found = _listed(target, hub_client.list_files(target.repo, revision or "main"), revision)
    return sorted(found, key=lambda each: each.bytes)


def _listed(target: Target, listing: Listing, revision: str | None) -> list[GgufOffer]:
    known = layout.gguf_choices(listing)
    if len(known) < 2:
        return []
    sizes = [sum(listing.files[name].size for name in each.files) for each in known]
    usual = gguf_choice.best(known)
    named = replace(target, choice=usual.files[0], name=usual.name(listing.repo, revision))
    try:
        offer = uncatalogued.of_listing(named, listing)
    except LocalqError as error:
        if error.exit_code not in (ExitCode.FAILURE, ExitCode.BAD_FILE):
            raise
        return [GgufOffer(each, size, None, error.why) for each, size in zip(known, sizes, strict=True)]
    found = []
    for each, size in zip(known, sizes, strict=True):
        name = each.name(listing.repo, revision)
        derived = offer if each == usual else _derived(offer, name, size, each.tag)
        extra = size - sizes[known.index(usual)]
        assert offer.source is not None, "it is on the hub"
        source = replace(offer.source, bytes=offer.source.bytes + extra, choice=each.label)
        found.append(GgufOffer(each, size, replace(derived, source=source)))
    return found


def _derived(offer: Offer, name: str, size: int, tag: str = "") -> Offer:
    """The offer of a model in a file of `size` bytes by that of another one in the same repository."""
    arch, file_bits = offer.arch, 8 * size / offer.arch.parameters
    derived = replace(offer, name=name, file_bits=file_bits)
    if file_bits > MOST_BITS:
        whole = footprint.weights_bytes(arch, "bf16")["weights"]
        return replace(derived, arch=replace(arch, stored_head=0), scheme="", block_bytes=whole)
    share = file_bits / min(offer.file_bits or 16.0, 16.0)
    bits = footprint.bits_per_weight(arch, offer.format, offer.scheme) * share
    arch = replace(arch, stored_head=round(arch.stored_head * share))
    block_bytes = None if offer.block_bytes is None else round(offer.block_bytes * share)
    slow = "" if tag_has_kernel(tag) else f", {tag}"
    return replace(derived, arch=arch, scheme=f"{MIX}{bits:.2f}{slow}", block_bytes=block_bytes)


def _local(target: Target, revision: str | None) -> list[GgufOffer]:
    assert target.repo is not None, "only a repository has several"
    folder = hub_cache.snapshot_folder(target.repo, revision or "main")
    found = []
    for each in hub.local_choices(target.repo, revision or "main"):
        assert folder is not None, "it has them"
        size = sum((folder / name).stat().st_size for name in each.files)
        named = replace(target, name=each.name(target.repo, revision), choice=each.label, revision=revision)
        try:
            offer = uncatalogued.offer(named, offline=True)
        except LocalqError as error:
            found.append(GgufOffer(each, size, None, error.why))
        else:
            found.append(GgufOffer(each, size, offer))
    return found
