"""Files of a repository that make up a model: safetensors and their companions, or one GGUF model.

From the names and sizes that the hub lists. No network.
"""

from __future__ import annotations

import re

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import gguf_choice, quantization_files
from localq.files.gguf_choice import GgufChoice, SeveralGgufError
from localq.files.hub import cache as hub_cache
from localq.files.hub.client import Listing, RemoteFile
from localq.files.safetensors_headers import INDEX_NAME, SHARD_NAME, SINGLE_NAME

# The files that are fetched in addition to weights; localq reads no others.
SMALL_FILES = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|chat_template)\.json"
    rf"|{'|'.join(map(re.escape, quantization_files.NAMES))}|chat_template[A-Za-z0-9._-]*\.jinja"
    r"|tokenizer[A-Za-z0-9._-]*\.(json|model)"
)
MAX_SMALL_BYTES = 64 * 2**20  # of a file that is not weights; the largest vocabularies take 35 MB
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def named_files(listing: Listing, names: tuple[str, ...]) -> list[RemoteFile]:
    """The files of these names. Raises LocalqError (exit 4) for a missing one."""
    for name in names:
        if name not in listing.files:
            step = "Check the name and the revision."
            raise LocalqError(listing.repo, f"{name} does not exist in this repository", step, ExitCode.UNKNOWN_MODEL)
    return [listing.files[name] for name in names]


def gguf_choices(listing: Listing) -> list[GgufChoice]:
    """The GGUF models among which a plain name of the repository does not choose; [] if there are safetensors."""
    if SINGLE_NAME in listing.files or INDEX_NAME in listing.files:
        return []
    return gguf_choice.choices(listing.files)


def gguf_model(listing: Listing, choice: str = "") -> tuple[str, ...]:
    """The files of the GGUF model that `choice` names; else of the only one of a repository without safetensors.

    () without `choice` if there are none, or safetensors. Raises LocalqError: exit 2 for several, 4 for none of that
    name.
    """
    if choice:
        return gguf_choice.select(gguf_choice.choices(listing.files), choice, listing.repo).files
    found = gguf_choices(listing)
    if len(found) > 1:
        raise SeveralGgufError(listing.repo, found)
    return found[0].files if found else ()


def gguf_files(listing: Listing, names: tuple[str, ...] = (), choice: str = "") -> list[RemoteFile]:
    """The files to fetch for a GGUF model: `names` alone, or those of `gguf_model` after the small files; or [].

    Raises LocalqError as `gguf_model`, and exit 4 for a missing one of `names`.
    """
    if names:
        return named_files(listing, names) if all(name.endswith(".gguf") for name in names) else []
    found = gguf_model(listing, choice)
    small = [file for name, file in sorted(listing.files.items()) if SMALL_FILES.fullmatch(name)] if found else []
    check_small(listing)
    return [*small, *named_files(listing, found)]


def check_layout(listing: Listing) -> None:
    """Before the download: raises LocalqError (exit 8) for a repository that localq cannot load."""
    names = listing.files
    check_small(listing)
    if SINGLE_NAME not in names and INDEX_NAME not in names:
        if pickles := sorted(name for name in names if name.endswith(PICKLE_SUFFIXES)):
            why = f"the weights are pickle files ({pickles[0]}), which can run arbitrary code when loaded"
            raise bad_file(listing.repo, why, "Use a repository with .safetensors files.")
        others = sorted(name for name in names if SHARD_NAME.fullmatch(name))
        why = f"the repository contains neither {SINGLE_NAME} nor {INDEX_NAME}"
        if others:
            why += f", only {others[0]}" + (f" and {len(others) - 1} more" if len(others) > 1 else "")
        raise bad_file(listing.repo, why, "Use a repository in the transformers layout.")
    for name in (hub_cache.MARKER_NAME, hub_cache.TOKENIZER_NAME):
        if name not in names:
            raise bad_file(
                listing.repo, f"the repository has no {name}, which localq requires", "Use another repository."
            )


def check_small(listing: Listing) -> None:
    """Raises LocalqError (exit 8) for a file beside the weights that is too large for one."""
    for name, file in sorted(listing.files.items()):
        if file.size > MAX_SMALL_BYTES and (SMALL_FILES.fullmatch(name) or name == INDEX_NAME):
            why = f"{name} is too large ({file.size:,} bytes; limit: {MAX_SMALL_BYTES:,})"
            raise bad_file(listing.repo, why, "Use another repository or revision.")
