"""Offers for models outside the catalogue, from their files on this machine or on the hub.

For a repository that is not on this machine, configuration and headers are fetched: about 100 kB per safetensors file,
a few MB of a .gguf file, whose header contains the vocabulary. Nothing stays on the disk.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts, gguf_choice, stored_format
from localq.files.architecture import Architecture
from localq.files.catalog import Source, Target
from localq.files.hub import client as hub_client
from localq.files.hub import errors as hub_errors
from localq.files.hub import fetch as hub
from localq.files.hub import remote as hub_remote
from localq.files.hub.client import Listing
from localq.files.model_folder import ModelFiles, open_model
from localq.planner.offers import Offer

_AS_BF16 = ("fp32", stored_format.UNKNOWN)  # loaded in 16 bit


def offer(target: Target, offline: bool) -> Offer:
    """The offer of a folder, file or repository: from this machine, else from the hub.

    Raises LocalqError: as `hub.fetch` for a repository that is not here; exit 8 for damaged files, 1 for an
    unsupported architecture or format.
    """
    path = hub.local_path(target)
    return _of_files(target.name, path, None) if path is not None else remote(target, offline)


def remote(target: Target, offline: bool = False, revision: str | None = None) -> Offer:
    """The offer of a repository on the hub, at `revision` or that of `target`."""
    assert target.repo is not None, "folders and files are on this machine"
    source = hub.repo_source(target, revision)
    if offline or hub_client.is_offline():
        raise hub.offline_error(source)
    return of_listing(target, hub_client.list_files(source.repo, source.revision))


def of_listing(target: Target, listing: Listing) -> Offer:
    """The offer of a repository whose files are known; only headers are fetched. Raises LocalqError as `offer`."""
    if listing.gated and not hub_client.has_token():
        raise hub_errors.gated_error(listing.repo)
    with hub_remote.outline(listing, target.choice) as path:
        size = hub_remote.download_bytes(listing, path, target.choice)
        source = Source(
            format="", repo=listing.repo, revision=listing.commit, choice=target.choice, bytes=size,
            gated=listing.gated, verified=True,
        )  # fmt: skip
        return _of_files(target.name, path, source)


def _of_files(name: str, path: Path, source: Source | None) -> Offer:
    files = open_model(path, stubs=source is not None)
    format = "gguf" if files.kind == "gguf" else stored_format.format_of_config(files.config)
    arch, scheme = Architecture.from_config(files.config), stored_format.scheme_of(files)
    arch = replace(arch, thinks=files.thinks, stored_head=stored_format.stored_head(files))
    exact = stored_format.block_bytes(files) if format == "gguf" else _block_bytes(files, path, format)
    stored = "" if format == "gguf" else stored_format.format_of_files(files)
    format = "bf16" if format in _AS_BF16 else format
    if format not in format_facts.FORMATS:
        step = stored_format.INSTEAD.get(format) or f"Supported: {', '.join(format_facts.FORMATS)}."
        raise LocalqError(
            name, f"the weights are in the format {format!r}, which localq does not support", step, ExitCode.FAILURE
        )
    if variant := stored_format.unreadable(files.quantization):
        why, step = f"the weights use an unsupported format: {variant}", "Use a different repository for this model."
        raise LocalqError(name, why, step, ExitCode.FAILURE)
    unsupported = format_facts.why_unsupported(arch, format)
    size = sum(part.stat().st_size for part in gguf_choice.parts_of(path)) if files.kind == "gguf" else 0
    bits = 8 * size / arch.parameters if files.kind == "gguf" else None
    if stored == "fp32":
        bits = 32.0
    return Offer(
        name, arch, format, scheme, source, unsupported=unsupported, block_bytes=exact, file_bits=bits,
        file_format="" if stored == stored_format.UNKNOWN else stored,
    )  # fmt: skip


def _block_bytes(files: ModelFiles, path: Path, format: str) -> int | None:
    """Exact bytes of the blocks of safetensors files; None for weights in 32 bit, which a load makes 16-bit ones of."""
    if format in _AS_BF16:
        return None
    return hub_remote.block_bytes(path, files.text_config.get("num_hidden_layers"), files.quantization)
