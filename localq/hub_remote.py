"""What a repository is, before its weights are fetched: its configuration, and the headers of its files of weights.

Laid out as a folder that everything which looks at models can look at: the small files are whole, a file of weights has
its header and its length and nothing behind it, so it takes no room on the disk. Headers come by Range requests.
"""

from __future__ import annotations

import contextlib
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from localq import hub, hub_client
from localq.errors import bad_file
from localq.hub_client import Listing, RemoteFile
from localq.safetensors_header import INDEX_NAME, MAX_HEADER_BYTES, SINGLE_NAME, read_header, read_index, shard_paths

HEAD_BYTES = 100_000  # of a file; most headers are shorter
MAX_SMALL_BYTES = 64 * 2**20
_OUTLINED = re.compile(r"(config|generation_config|tokenizer_config)\.json")
_BLOCK = re.compile(r"(^|\.)layers\.\d+\.")
_NOT_TEXT = re.compile(r"vision|visual|audio")


class _Asks(Protocol):
    def __call__(self, ask: Callable[[], bytes]) -> bytes: ...


def _once(ask: Callable[[], bytes]) -> bytes:
    return ask()


@contextlib.contextmanager
def outline(listing: Listing) -> Iterator[Path]:
    """The folder of `listing`, while the context lasts. Raises LocalqError as `hub.fetch` does."""
    hub.check_layout(listing)
    with tempfile.TemporaryDirectory(prefix="localq-outline-") as name:
        folder, files = Path(name), listing.files
        small = [file for name, file in files.items() if _OUTLINED.fullmatch(name)]
        for file in [*small, *([] if SINGLE_NAME in files else [files[INDEX_NAME]])]:
            if file.size > MAX_SMALL_BYTES:
                why = f"{file.name} has {file.size:,} bytes, which no such file has"
                raise bad_file(listing.repo, why, "Use another repository or revision.")
            (folder / file.name).write_bytes(hub_client.first_bytes(listing, file, file.size))
        for shard in sorted(set(read_index(folder).values())) or [SINGLE_NAME]:
            if shard not in files:
                why = f"{INDEX_NAME} names {shard}, which is not there"
                raise bad_file(listing.repo, why, "Use another repository or revision.")
            outline_file(listing, files[shard], folder / shard)
        yield folder


def outline_file(listing: Listing, file: RemoteFile, path: Path, asks: _Asks = _once) -> None:
    """Make `path` a file with the header and the length of `file`. `asks` decides how often the hub is asked.

    Raises LocalqError: exit 6 where the hub stays away, 8 where the length is none.
    """
    head = asks(lambda: hub_client.first_bytes(listing, file, HEAD_BYTES))
    length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if len(head) - 8 < length <= MAX_HEADER_BYTES:
        head = asks(lambda: hub_client.first_bytes(listing, file, 8 + length))
    try:
        with path.open("wb") as stub:
            stub.write(head[: 8 + length])
            stub.truncate(file.size)
    except (OSError, OverflowError) as error:
        why = f"{file.name} is said to have {file.size:,} bytes, which no file here can have ({error})"
        raise bad_file(listing.repo, why, "Use another repository or revision.") from error


def block_bytes(folder: Path) -> int:
    """Bytes of the weights in the blocks of the text model, as the headers in `folder` say. Raises LocalqError."""
    total = 0
    for path in shard_paths(folder).values():
        for name, tensor in read_header(path).tensors.items():
            if _BLOCK.search(name) and not _NOT_TEXT.search(name):
                total += tensor.nbytes
    return total
