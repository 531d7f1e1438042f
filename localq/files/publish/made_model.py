"""A finished model folder of `localq quantize`: its files with their hashes, its record and its bits per weight."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.files import checked_files, json_files, stored_format, verification
from localq.files.architecture import Architecture
from localq.files.checked_files import Stamp
from localq.files.hub import cache as hub_cache
from localq.files.model_folder import STATE_NAME, ModelFiles, open_model
from localq.files.publish import record as records
from localq.files.publish.record import ConversionRecord
from localq.files.safetensors_headers import Entry, read_header, shard_paths
from localq.wording import OnProgress

# Texts of a licence: sent with a model although no load reads them.
LICENCE_TEXT = re.compile(r"(LICEN[SC]E|NOTICE|USE_POLICY|COPYING)[A-Za-z0-9._-]{0,100}")
MAX_LICENCE_BYTES = 2**20
MAX_REGULAR_BYTES = 64 * 2**20  # larger files are never in git itself
# Tensors of the matrices of decoder blocks, and codebooks that several of them share.
_OF_MATRICES = re.compile(
    r"(?:(?:model|language_model|text_model|backbone)\.)*(?:layers\.\d+\.(?:\w+\.)*?"
    r"(?:\w+_proj|kv_a_proj_with_mqa|\w+_linear|w[123]|in_proj_(?:qkv|z))\.(?!bias$).+"
    r"|(?:layers\.\d+\.)?(?:\w+\.)*codebook\w*)"
)


_REPLACE_LINK = "Replace the link with the file."


@dataclass(frozen=True)
class SentFile:
    """A file of the upload. path: where it is; None for one whose `content` is made here.

    stamp: of the file at `path` when it was hashed (`checked_files.stamp`).
    """

    name: str
    size: int
    sha256: str
    git_sha1: str
    path: Path | None = None
    content: bytes = b""
    stamp: Stamp = field(default_factory=dict)

    def is_at(self, content_id: str) -> bool:
        """Return whether a file of the hub with this hash has the same content."""
        return bool(content_id) and content_id in (self.sha256, self.git_sha1)


@dataclass(frozen=True)
class MadeModel:
    """A model that was made here.

    files       what a load needs, and the licence's texts; all hashes were checked
    record      how it was made; None if it was made before records were kept
    bits        per weight of the decoder's matrices, with all that their formats store; None if not known
    all_bits    per weight of the whole model
    """

    folder: Path
    format: str
    scheme: str
    files: tuple[SentFile, ...]
    record: ConversionRecord | None
    parameters: int
    weights_bytes: int
    bits: float | None
    all_bits: float | None

    def text_of(self, name: str) -> str | None:
        """The content of a licence text in the folder; None without it."""
        found = next((each for each in self.files if each.name == name), None)
        return json_files.read_text(found.path, MAX_LICENCE_BYTES) if found is not None and found.path else None


def open_made(folder: Path, on_progress: OnProgress | None = None) -> MadeModel:
    """The model in `folder`; its files are hashed if they changed since they were last.

    Raises LocalqError: exit 4 without such a folder, 2 for one that localq did not make, 8 for an unfinished or damaged
    one and for a link to a file outside, 9 if it cannot be read.
    """
    what = str(folder)
    if not folder.is_dir():
        raise LocalqError(
            what, "there is no such folder", "Use the --out folder of `localq quantize`.", ExitCode.UNKNOWN_MODEL
        )
    with disk.read_errors(folder, what):
        if (folder / STATE_NAME).exists():
            step = "Run the same `localq quantize` command to finish it."
            raise bad_file(what, "the quantization is not finished", step)
        sums = checked_files.recorded_sums(folder)
        if not sums:
            why = f"not made by `localq quantize`: it has no {checked_files.SUMS_NAME}"
            raise usage_error(what, why, "To upload folders made by other programs, use `hf upload`.")
        _check_links(folder)
        _check_whole(folder, sums)
        if (damage := verification.find_damage(folder, what, on_progress)) is not None:
            raise damage
        return _describe(folder, sums)


def _check_links(folder: Path) -> None:
    """Raise LocalqError (exit 8) for a link that would publish a file from outside the folder."""
    root = disk.resolve(folder)
    for path in sorted(folder.iterdir()):
        if not path.is_symlink():
            continue
        if LICENCE_TEXT.fullmatch(path.name):
            raise bad_file(str(path), "a licence text must not be a symbolic link", _REPLACE_LINK)
        if not disk.resolve(path).is_relative_to(root):
            raise bad_file(str(path), "the symbolic link points outside the model folder", _REPLACE_LINK)


def _check_whole(folder: Path, sums: dict[str, str]) -> None:
    """Raise LocalqError (exit 8) if a file that a load needs is missing or has no recorded hash."""
    needed = {hub_cache.MARKER_NAME, hub_cache.TOKENIZER_NAME}
    needed |= {path.name for path in shard_paths(folder).values()}
    if absent := sorted(needed - sums.keys()):
        why = f"{absent[0]} has no recorded hash, so the model is incomplete or was changed"
        raise bad_file(str(folder), why, "Quantize the model again.")


def _describe(folder: Path, sums: dict[str, str]) -> MadeModel:
    files = open_model(folder)
    licences = [
        path.name
        for path in sorted(folder.iterdir())
        if LICENCE_TEXT.fullmatch(path.name) and path.is_file() and path.stat().st_size <= MAX_LICENCE_BYTES
    ]
    names = [*sums, checked_files.SUMS_NAME, *(name for name in licences if name not in sums)]
    sent = tuple(_sent(folder, name, sums.get(name)) for name in names)
    tensors = dict(_tensors(folder))
    held = sum(path.stat().st_size for path in set(shard_paths(folder).values()))
    arch = _architecture(files)
    return MadeModel(
        folder,
        stored_format.format_of_files(files),
        stored_format.scheme_of(files),
        sent,
        records.read(folder),
        arch.parameters if arch is not None else 0,
        held,
        _matrix_bits(tensors, arch),
        8 * sum(each.nbytes for each in tensors.values()) / arch.parameters if arch is not None else None,
    )


def _sent(folder: Path, name: str, sha256: str | None) -> SentFile:
    path = json_files.inside(folder, name)
    if path is None:
        raise bad_file(str(folder / name), "the file is missing", "Quantize the model again.")
    stamp = checked_files.stamp(path)
    size = stamp["size"]
    git_sha1 = disk.git_blob_sha1_of(path) if size <= MAX_REGULAR_BYTES else ""
    return SentFile(name, size, sha256 or disk.sha256_of(path), git_sha1, path, stamp=stamp)


def _tensors(folder: Path) -> Iterator[tuple[str, Entry]]:
    for path in set(shard_paths(folder).values()):
        yield from read_header(path).tensors.items()


def _architecture(files: ModelFiles) -> Architecture | None:
    try:
        return Architecture.from_config(files.config)
    except LocalqError:
        return None


def _matrix_bits(tensors: dict[str, Entry], arch: Architecture | None) -> float | None:
    """Bits per weight of the matrices of decoder blocks: codes, scales, codebooks, and those left unquantized."""
    stored = sum(each.nbytes for name, each in tensors.items() if _OF_MATRICES.fullmatch(name))
    return 8 * stored / arch.linear_parameters if arch is not None and stored else None
