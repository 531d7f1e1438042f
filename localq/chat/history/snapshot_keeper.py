"""Which conversation the engine has read, and when that goes to a file and comes back. Knows neither text nor tensors.

A conversation is written when another is about to take its place in the KV cache and when the chat ends, where reading
it again would take the model WORTH_S longer than the file takes; it comes back before its next reply. Nothing of this
ever fails a reply: what went wrong is `told`, and then the conversation is read. Torch-free.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localq.chat.history import snapshot_files
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError, usage_error
from localq.settings import Settings
from localq.stats import Stats
from localq.wording import parse_bytes

if TYPE_CHECKING:  # start-up cost
    from localq.chat.history.record import Record
    from localq.worker.messages import Loaded

WORTH_S = 1.0
FILE_BYTES_PER_S = 1e9  # of a disk and its hashes; a model that reads faster than this needs no files
HEADER_BYTES, ID_BYTES = 2**16, 12  # of a file besides keys and values, at most: fixed, and for each token


class Client(Protocol):
    """What is needed of `worker.client.EngineClient`."""

    @property
    def alive(self) -> bool: ...
    def save_cache(self, path: str) -> int: ...
    def restore_cache(self, path: str) -> int: ...


class SnapshotKeeper:
    """For the conversations of one chat, whose replies it is told of. One call at a time."""

    def __init__(self, database: Path, cap_bytes: int) -> None:
        """`database`: where the conversations are saved; all snapshots together take `cap_bytes` at most."""
        self._database, self._cap_bytes = database, cap_bytes
        self._record: Record | None = None  # the conversation in the cache
        self._loaded: Loaded | None = None  # the load that the cache belongs to
        self._stats = Stats()  # of its last reply; context_used 0: nothing to write
        self._read, self._read_s = 0, 0.0  # tokens, and the time that reading them took, since the load
        self._told = ""

    def take_notice(self) -> str:
        """Why the last snapshot was not used or not kept, once; empty where all went well or there was none."""
        told, self._told = self._told, ""
        return told

    def restore(self, client: Client, record: Record, loaded: Loaded) -> None:
        """Called before a reply in `record`: bring what was read of it back, unless the cache holds it.

        Raises LocalqError only where the engine process died of it.
        """
        if loaded is self._loaded and self._record is not None and self._same(record):
            self._stats = Stats()  # of a reply that may fail; `replied` says what is in the cache then
            return
        if loaded is self._loaded:
            self.save(client)
        else:
            self._read, self._read_s = 0, 0.0
        self._record, self._loaded, self._stats = record, loaded, Stats()
        path = self._path(record)
        if path is None or not os.path.exists(path):  # False too where the folder is not ours to look into
            return
        try:
            client.restore_cache(str(path))
            snapshot_files.mark_used(path)
        except LocalqError as error:
            if not client.alive:
                self._loaded = None
                snapshot_files.remove(path)  # the next process shall not end by it too
                raise
            self._told = str(error)
            if error.exit_code == ExitCode.BAD_FILE:
                snapshot_files.remove(path)

    def record_reply(self, stats: Stats) -> None:
        """Called after a reply in the conversation that was taken up, with the figures of its end."""
        self._stats = stats
        self._read += stats.prefilled_tokens
        self._read_s += stats.prefill_s

    def forget(self) -> None:
        """Called when something that is no conversation was read: the next reply takes its conversation up again."""
        self._record, self._stats = None, Stats()

    def save(self, client: Client) -> None:
        """Write what was read of the conversation in the cache, if that is new and worth it. Raises nothing.

        An interrupt (KeyboardInterrupt) breaks it off; then the file that was there before still is.
        """
        record, loaded, stats = self._record, self._loaded, self._stats
        path = None if record is None else self._path(record)
        if path is None or loaded is None or not client.alive:
            return
        self._stats = Stats()
        share = loaded.ledger.get("kv_cache", 0) * stats.context_used // max(1, loaded.context_size)
        needed_bytes = share + HEADER_BYTES + ID_BYTES * stats.context_used
        if self._is_gone(record) or not self._is_worth_it(stats.context_used, needed_bytes):
            return
        try:
            snapshot_files.make_room(path, needed_bytes, self._cap_bytes)
            client.save_cache(str(path))
            if self._is_gone(record):  # deleted while it was written, so that there was no file yet to go with it
                snapshot_files.remove(path)
        except LocalqError as error:
            self._told = str(error) if error.what == snapshot_files.NOT_KEPT else f"{snapshot_files.NOT_KEPT}: {error}"

    def _is_gone(self, record: Record | None) -> bool:
        """`record` was deleted, here or by another process: nothing of it shall come back to the disk."""
        with contextlib.suppress(LocalqError):  # conversations that cannot be read: they are not gone
            store = ConversationStore(self._database)
            return record is not None and store.path.exists() and record.id not in store.ids()
        return False

    def _is_worth_it(self, tokens: int, needed_bytes: int) -> bool:
        """Reading so many tokens again would take so much longer, as far as the replies so far tell."""
        if not self._read:
            return False
        return tokens * self._read_s / self._read >= WORTH_S + needed_bytes / FILE_BYTES_PER_S

    def _same(self, record: Record) -> bool:
        known = self._record
        return known is record or (known is not None and record.id is not None and known.id == record.id)

    def _path(self, record: Record) -> Path | None:
        return None if record.id is None else snapshot_files.snapshot_path(self._database, record.id)


def keeper(database: Path, settings: Settings) -> SnapshotKeeper | None:
    """By the setting `snapshots`; None where it is off. Raises LocalqError (exit 2) for what is no size."""
    cap_bytes = size_limit(settings)
    return SnapshotKeeper(database, cap_bytes) if cap_bytes else None


def unused_snapshots(settings: Settings) -> list[snapshot_files.UnusedFile]:
    """What can go of the snapshots of the user's conversations. Raises LocalqError (exit 9)."""
    store, ids = ConversationStore(), None
    with contextlib.suppress(LocalqError):  # conversations that cannot be read: they are not gone
        ids = store.ids() if store.path.exists() else set()
    return snapshot_files.unused_files(store.path, ids, size_limit(settings))


def size_limit(settings: Settings) -> int:
    """Bytes that all snapshots together may take. Raises LocalqError (exit 2) for what is no size."""
    text = settings.snapshots.strip().lower()
    if text == "off":
        return 0
    try:
        return parse_bytes(text)
    except LocalqError as error:
        raise usage_error("snapshots", f"{text!r} is not a size", "Use something like 4GiB, or off.") from error
