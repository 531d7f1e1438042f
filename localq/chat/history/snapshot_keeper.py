"""Saves and restores snapshots of the KV cache as a chat changes conversations.

A snapshot is written when another conversation replaces it in the cache and when the chat ends, if reading the
conversation again would take WORTH_S longer than the file; it is restored before the next reply. Errors never fail a
reply: they become a notice (`take_notice`), and the conversation is read again.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from localq.chat.history import snapshot_files
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError, usage_error
from localq.settings import Settings
from localq.stats import Stats
from localq.wording import parse_bytes

if TYPE_CHECKING:  # start-up cost
    from localq.chat.client import Client
    from localq.chat.history.record import Record
    from localq.worker.messages import Loaded

WORTH_S = 1.0
FILE_BYTES_PER_S = 1e9  # of writing and hashing a file
HEADER_BYTES, ID_BYTES = 2**16, 12  # upper bounds of a file beside keys and values: fixed, and for each token


class SnapshotKeeper:
    """Snapshots for the conversations of one chat. One call at a time."""

    def __init__(self, database: Path, cap_bytes: int) -> None:
        """database: file of the conversations; all snapshots together take at most `cap_bytes`."""
        self._database, self._cap_bytes = database, cap_bytes
        self._record: Record | None = None  # the conversation in the cache
        self._loaded: Loaded | None = None  # the load that the cache belongs to
        self._stats = Stats()  # of its last reply; context_used 0: nothing to save
        self._read, self._read_s = 0, 0.0  # tokens of prefill since the load, and its time
        self._notice = ""

    def take_notice(self) -> str:
        """Return and clear the reason the last snapshot was not used or not saved; "" if nothing failed."""
        notice, self._notice = self._notice, ""
        return notice

    def restore(self, client: Client, record: Record, loaded: Loaded) -> None:
        """Called before a reply in `record`: restore its snapshot, unless the cache holds the conversation.

        Raises LocalqError only where the engine process died.
        """
        if loaded is self._loaded and self._record is not None and self._same(record):
            self._stats = Stats()  # the reply may fail; `record_reply` sets it
            return
        if loaded is self._loaded:
            self.save(client)
        else:
            self._read, self._read_s = 0, 0.0
        self._record, self._loaded, self._stats = record, loaded, Stats()
        path = None if loaded.shared else self._path(record)
        if path is None or not os.path.exists(path):  # also False for a folder without permission
            return
        try:
            client.restore_cache(str(path))
            snapshot_files.mark_used(path)
        except LocalqError as error:
            if not client.alive:
                self._loaded = None
                snapshot_files.remove(path)  # it must not end the next process too
                raise
            self._notice = str(error)
            if error.exit_code == ExitCode.BAD_FILE:
                snapshot_files.remove(path)

    def record_reply(self, stats: Stats) -> None:
        """Called after a reply in the restored conversation, with its final statistics."""
        self._stats = stats
        self._read += stats.prefilled_tokens
        self._read_s += stats.prefill_s

    def forget(self) -> None:
        """Called when a side request has overwritten the cache: the next reply restores its conversation."""
        self._record, self._stats = None, Stats()

    def save(self, client: Client) -> None:
        """Write a snapshot of the conversation in the cache, if it is new and worth it. Raises nothing.

        An interrupt (KeyboardInterrupt) cancels it and leaves the earlier file.
        """
        record, loaded, stats = self._record, self._loaded, self._stats
        path = None if record is None else self._path(record)
        if path is None or loaded is None or loaded.shared or not client.alive:
            return
        self._stats = Stats()
        share = loaded.ledger.get("kv_cache", 0) * stats.context_used // max(1, loaded.context_size)
        needed_bytes = share + HEADER_BYTES + ID_BYTES * stats.context_used
        if self._is_gone(record) or not self._is_worth_it(stats.context_used, needed_bytes):
            return
        try:
            snapshot_files.make_room(path, needed_bytes, self._cap_bytes)
            client.save_cache(str(path))
            if self._is_gone(record):  # deleted while the file was written
                snapshot_files.remove(path)
        except LocalqError as error:
            self._notice = (
                str(error) if error.what == snapshot_files.NOT_KEPT else f"{snapshot_files.NOT_KEPT}: {error}"
            )

    def _is_gone(self, record: Record | None) -> bool:
        """Return whether `record` was deleted, here or by another process: it must not be written again."""
        with contextlib.suppress(LocalqError):  # an unreadable database: treat none as deleted
            store = ConversationStore(self._database)
            return record is not None and store.path.exists() and record.id not in store.ids()
        return False

    def _is_worth_it(self, tokens: int, needed_bytes: int) -> bool:
        """Return whether rereading the tokens would take longer than the file, by the prefill speed so far."""
        if not self._read:
            return False
        return tokens * self._read_s / self._read >= WORTH_S + needed_bytes / FILE_BYTES_PER_S

    def _same(self, record: Record) -> bool:
        known = self._record
        return known is record or (known is not None and record.id is not None and known.id == record.id)

    def _path(self, record: Record) -> Path | None:
        return None if record.id is None else snapshot_files.snapshot_path(self._database, record.id)


def keeper(database: Path, settings: Settings) -> SnapshotKeeper | None:
    """The keeper by the setting `snapshots`; None where it is off. Raises LocalqError (exit 2) for an invalid size."""
    cap_bytes = size_limit(settings)
    return SnapshotKeeper(database, cap_bytes) if cap_bytes else None


def unused_snapshots(settings: Settings) -> list[snapshot_files.UnusedFile]:
    """Snapshots of the user's conversations that can be removed. Raises LocalqError (exit 9)."""
    store, ids = ConversationStore(), None
    with contextlib.suppress(LocalqError):  # an unreadable database: treat none as deleted
        ids = store.ids() if store.path.exists() else set()
    return snapshot_files.unused_files(store.path, ids, size_limit(settings))


def size_limit(settings: Settings) -> int:
    """Bytes that all snapshots together may take. Raises LocalqError (exit 2) for an invalid size."""
    text = settings.snapshots.strip().lower()
    if text == "off":
        return 0
    try:
        return parse_bytes(text)
    except LocalqError as error:
        raise usage_error("snapshots", f"{text!r:.80} is not a size", "Use a size such as 4GiB, or off.") from error
