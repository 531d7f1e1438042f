"""Outlines of repositories: configuration and headers of weights, without the weights.

An outline is a folder (or .gguf file) that the readers of models accept. Its small files are complete. A file of
weights has its header and its length, but no data: a sparse file that takes no room on the disk. Headers come by Range
requests.
"""

from __future__ import annotations

import contextlib
import errno
import re
import resource
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from localq import disk
from localq.errors import LocalqError, bad_file
from localq.files import device_bytes, quantization_files
from localq.files.extra_tensors import extra_tensors
from localq.files.gguf.binary import read_container
from localq.files.hub import client as hub_client
from localq.files.hub import layout
from localq.files.hub.client import Listing, RemoteFile
from localq.files.safetensors_headers import (
    INDEX_NAME,
    MAX_HEADER_BYTES,
    SINGLE_NAME,
    Entry,
    read_header,
    read_index,
    shard_paths,
)
from localq.files.scratch import scratch_folder

HEAD_BYTES = 100_000  # of the first request for a file; most headers are shorter
MIB = 2**20
GGUF_HEAD_BYTES = (2 * MIB, 12 * MIB, 48 * MIB)  # a vocabulary of 49,000 tokens takes 1.8 MB, of 128,000 tokens 8 MB
_OUTLINED = re.compile(
    r"(config|generation_config|tokenizer_config)\.json|chat_template\.jinja"
    rf"|{'|'.join(map(re.escape, quantization_files.NAMES))}"
)
_ENDS = re.compile(r"(^|\.)(embed_tokens|lm_head)\.")
_NOT_TEXT = re.compile(r"vision|visual|audio")


class _Asks(Protocol):
    def __call__(self, ask: Callable[[], bytes]) -> bytes: ...


def _once(ask: Callable[[], bytes]) -> bytes:
    return ask()


@contextlib.contextmanager
def outline(listing: Listing, choice: str = "") -> Iterator[Path]:
    """The outline of `listing`, a folder or .gguf file, while the context lasts.

    choice   tag or file name of a GGUF model, as for `layout.gguf_model`

    Raises LocalqError as `hub.fetch`, and exit 9 for the temporary folder. Errors name the repository instead of the
    temporary path.
    """
    gguf = layout.gguf_model(listing, choice)
    if not gguf:
        layout.check_layout(listing)
    with scratch_folder("localq-outline-") as folder:
        try:
            yield _gguf(listing, gguf, folder) if gguf else _folder(listing, folder)
        except LocalqError as error:
            what, why = (text.replace(str(folder), listing.repo) for text in (error.what, error.why))
            raise LocalqError(what, why, error.next_step, error.exit_code) from error


def to_fetch(listing: Listing, names: tuple[str, ...] = (), choice: str = "") -> list[RemoteFile]:
    """The files that `hub.fetch` would fetch: of a GGUF model (`layout.gguf_files`), or the model folder.

    Requests only an index. Raises LocalqError as `hub.fetch`.
    """
    if found := layout.gguf_files(listing, names, choice):
        return found
    layout.check_layout(listing)
    small = [file for name, file in sorted(listing.files.items()) if layout.SMALL_FILES.fullmatch(name)]
    index = [] if SINGLE_NAME in listing.files else [listing.files[INDEX_NAME]]
    with scratch_folder("localq-index-") as folder:
        _small(listing, index, folder)
        return [*small, *index, *(listing.files[name] for name in _shards(listing, folder))]


def _folder(listing: Listing, folder: Path) -> Path:
    files = listing.files
    small = [file for name, file in files.items() if _OUTLINED.fullmatch(name)]
    _small(listing, [*small, *([] if SINGLE_NAME in files else [files[INDEX_NAME]])], folder)
    for shard in _shards(listing, folder):
        outline_file(listing, files[shard], folder / shard)
    return folder


def _small(listing: Listing, files: list[RemoteFile], folder: Path) -> None:
    """Write whole files to `folder`. Raises LocalqError (exit 8) for one that is not what the hub lists."""
    for file in files:
        content = hub_client.first_bytes(listing, file, file.size)
        with disk.part_file(folder / file.name) as small:
            small.write(content)
        if not disk.has_content(folder / file.name, file.content_id):
            why = f"the hash of {file.name} differs from the one on the hub"
            raise bad_file(listing.repo, why, "Try again later, or use another revision.")


def _shards(listing: Listing, folder: Path) -> list[str]:
    """The names of the files of weights, from the index in `folder` if there is one."""
    shards = sorted(set(read_index(folder).values())) or [SINGLE_NAME]
    if absent := [name for name in shards if name not in listing.files]:
        why = f"{INDEX_NAME} lists {absent[0]}, which is not in the repository"
        raise bad_file(listing.repo, why, "Use another repository or revision.")
    return shards


def _gguf(listing: Listing, names: tuple[str, ...], folder: Path) -> Path:
    """The outline of a GGUF model, in one file or in parts; returns the first."""
    paths = [_gguf_file(listing, listing.files[name], folder / PurePosixPath(name).name) for name in names]
    return paths[0]


def _gguf_file(listing: Listing, file: RemoteFile, path: Path) -> Path:
    """The outline of a .gguf file. Its header does not state its length, so more is fetched until it parses."""
    for count in GGUF_HEAD_BYTES:
        _stub(listing, file, path, hub_client.first_bytes(listing, file, count))
        try:
            read_container(path)
        except LocalqError:
            if count >= min(file.size, GGUF_HEAD_BYTES[-1]):
                raise
        else:
            break
    return path


def outline_file(listing: Listing, file: RemoteFile, path: Path, asks: _Asks = _once) -> None:
    """Write a file with the header and the length of `file` to `path`.

    `asks` calls a request, with retries or not.

    Raises LocalqError: exit 6 if the hub cannot be reached, 8 for an impossible length; OSError for the disk.
    """
    head = asks(lambda: hub_client.first_bytes(listing, file, HEAD_BYTES))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if len(head) - 8 < length <= MAX_HEADER_BYTES:
        head = asks(lambda: hub_client.first_bytes(listing, file, 8 + length))
    _stub(listing, file, path, head[: 8 + length])


def _stub(listing: Listing, file: RemoteFile, path: Path, head: bytes) -> None:
    try:
        with disk.part_file(path) as stub:
            stub.write(head)
            stub.truncate(file.size)
    except (OSError, OverflowError) as error:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]  # the user's limit, -1 without one
        if isinstance(error, OSError) and (error.errno not in (errno.EFBIG, errno.EINVAL) or 0 <= limit < file.size):
            raise
        why = f"{file.name} ({file.size:,} bytes) is too large for this file system"
        raise bad_file(listing.repo, why, "Use another repository or revision.") from error


def download_bytes(listing: Listing, outlined: Path, choice: str = "") -> int:
    """Bytes that fetching `listing` takes; `outlined` is its outline, of the same `choice`."""
    if outlined.is_file():
        return sum(file.size for file in layout.gguf_files(listing, choice=choice))
    small = {name for name in listing.files if layout.SMALL_FILES.fullmatch(name)}
    return sum(listing.files[name].size for name in small | {each.name for each in outlined.iterdir()})


def block_bytes(folder: Path, layers: object = None, quantization: Mapping[str, Any] | None = None) -> int:
    """Bytes in memory of the text model without embedding and head, from the headers in `folder` (`device_bytes`).

    `layers` as for `extra_tensors`, which do not count; quantization: of config.json. Raises LocalqError.
    """
    tensors: dict[str, Entry] = {}
    for path in shard_paths(folder).values():
        tensors |= read_header(path).tensors
    extra = {name for names in extra_tensors(tensors, layers).values() for name in names}
    counted = (name for name in tensors if not _ENDS.search(name) and not _NOT_TEXT.search(name) and name not in extra)
    return sum(device_bytes.of_tensor(tensors, name, quantization or {}) for name in counted)
