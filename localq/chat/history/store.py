"""Conversations on disk: `<data>/sessions.db`, an SQLite file that survives kill -9 and power cuts.

schema    sessions (title, model, system, settings as JSON, head = a row of turns, used = a counter that grows with
          every save, so that a clock change does not reorder them), turns (one row each, with the row of its parent)
          and summaries (text used in prompts in place of the turns up to one; the table is added to older files, and
          older versions ignore it); `PRAGMA user_version` is the version, `application_id` identifies the file
journal   rollback (DELETE), synchronous=EXTRA: a save is one transaction a turn; the file is complete on its own and
          works on network disks. Not WAL: up to SQLite 3.51.2, which Python still ships, two processes on one file
          can damage it (the WAL-reset bug)
locks     none between calls: each opens the file, does one transaction and closes it, from any thread. Two processes
          in one conversation add branches to the same tree; nothing is overwritten
privacy   mode 0600; deleted rows are overwritten with zeros

A damaged file, one of a newer version or of another program is a LocalqError (exit 8), and is left unchanged.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from localq import disk, places, processes
from localq.chat.history import snapshot_files
from localq.chat.history.conversation import Conversation, Turn, TurnSummary
from localq.chat.history.record import Record, RecordSummary, from_rows, text, turn_facts
from localq.errors import ExitCode, LocalqError, bad_file, usage_error

SCHEMA = 1
APPLICATION_ID = 0x6C6F7171  # "loqq"
BUSY_S = 10.0  # wait for the transaction of another process, which takes milliseconds
_ONE_AT_A_TIME = threading.RLock()  # for threads; other processes wait at the file lock
MOST_SEARCHED = 1000  # characters of a text to search for; SQLite takes 50,000 bytes
KEPT_S = 86400.0  # how long a deleted conversation can be restored
_TABLES = """
CREATE TABLE sessions (id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, model TEXT NOT NULL, system TEXT,
  settings TEXT NOT NULL, head INTEGER, used INTEGER NOT NULL, changed_s REAL NOT NULL, deleted_s REAL);
CREATE INDEX sessions_used ON sessions (used);
CREATE TABLE turns (id INTEGER PRIMARY KEY AUTOINCREMENT, session INTEGER NOT NULL, parent INTEGER, role TEXT NOT NULL,
  content TEXT NOT NULL, complete INTEGER NOT NULL, created_s REAL NOT NULL, stats TEXT);
CREATE INDEX turns_session ON turns (session);
"""
_SUMMARIES = """CREATE TABLE IF NOT EXISTS summaries (id INTEGER PRIMARY KEY AUTOINCREMENT, session INTEGER NOT NULL,
  upto INTEGER NOT NULL, made_at INTEGER NOT NULL, content TEXT NOT NULL)"""
_WITHOUT = "To chat without saving, use `localq chat --no-save`."
_DAMAGED = (
    f"The file is unchanged. Move it out of the way, or recover its contents with `sqlite3 FILE .recover`. {_WITHOUT}"
)


class ConversationStore:
    """The database at `path`. Methods may be called from any thread and raise LocalqError."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or places.sessions_file()

    def check(self) -> None:
        """Create the file if there is none; raise where it cannot be used. Purges old deleted conversations."""
        with self._transaction() as db:
            old = (time.time() - KEPT_S,)
            db.execute("DELETE FROM turns WHERE session IN (SELECT id FROM sessions WHERE deleted_s < ?)", old)
            db.execute("DELETE FROM sessions WHERE deleted_s < ?", old)
            db.execute("DELETE FROM summaries WHERE session NOT IN (SELECT id FROM sessions)")

    def save(self, session: Record) -> None:
        """Write the new turns in one transaction. A conversation deleted meanwhile is saved as a new one.

        Ctrl-C does not interrupt a save, so turns are never written twice.
        """
        processes.run_to_completion(lambda: self._save(session))

    def _save(self, session: Record) -> None:
        with _ONE_AT_A_TIME:  # includes the rows: another thread continues after them
            session.id, session.rows, session.summary_rows = self._saved(session)

    def _saved(self, session: Record) -> tuple[int, list[int], dict[TurnSummary, int]]:
        """Save; return the id and the rows of turns and summaries."""
        now = session.conversation  # it may grow meanwhile: references to turns are read before the turns
        conversation = Conversation(head=now.head, system=now.system, summaries=list(now.summaries))
        conversation.turns = list(now.turns)
        with self._transaction() as db:
            known = (
                session.id is not None
                and db.execute("SELECT 1 FROM sessions WHERE id = ? AND deleted_s IS NULL", (session.id,)).fetchone()
            )
            id, rows = (session.id, list(session.rows)) if known else (None, [])
            summary_rows = dict(session.summary_rows) if known else {}
            if id is None:
                empty = "INSERT INTO sessions VALUES (NULL, ?, '', NULL, 'null', NULL, 0, 0, NULL)"
                id = db.execute(empty, (_clean(session.name()),)).lastrowid
                assert id is not None
            for turn in conversation.turns[len(rows) :]:
                rows.append(_insert(db, id, None if turn.parent is None else rows[turn.parent], turn))
            _save_summaries(db, id, conversation, rows, summary_rows)
            head = None if conversation.head is None else rows[conversation.head]
            system = conversation.system and _clean(conversation.system)
            settings = json.dumps(session.settings and asdict(session.settings))
            db.execute(
                "UPDATE sessions SET model = ?, system = ?, settings = ?, head = ?, changed_s = ?, "
                "used = (SELECT 1 + max(used) FROM sessions) WHERE id = ?",
                (_clean(session.model), system, settings, head, time.time(), id),
            )
        return id, rows, summary_rows

    def load(self, id: int) -> Record:
        """The conversation `id`. Raises LocalqError (exit 2) where there is none."""
        with self._transaction() as db:
            query = "SELECT title, model, system, settings, head FROM sessions WHERE id = ? AND deleted_s IS NULL"
            found = db.execute(query, (id,)).fetchone()
            columns = "id, parent, role, content, complete, created_s, stats"
            turns = db.execute(f"SELECT {columns} FROM turns WHERE session = ? ORDER BY id", (id,)).fetchall()
            query = "SELECT id, upto, made_at, content FROM summaries WHERE session = ? ORDER BY id"
            summaries = db.execute(query, (id,)).fetchall()
        if found is None:
            raise _unknown(str(id))
        with self._damage_named():
            return from_rows(id, found, turns, summaries)

    def summaries(self, matching: str = "", limit: int = 1000) -> list[RecordSummary]:
        """Conversations with `matching` in the title or in any turn, the last used first.

        Raises LocalqError (exit 2) for more than MOST_SEARCHED characters.
        """
        if len(matching) > MOST_SEARCHED:
            why = f"too long (limit: {MOST_SEARCHED:,} characters)"
            raise usage_error("search text", why, "Use a shorter one.")
        escaped = matching.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
        query = """SELECT id, title, model, (SELECT count(*) FROM turns WHERE session = sessions.id), changed_s
            FROM sessions WHERE deleted_s IS NULL AND (? = '%%' OR title LIKE ? ESCAPE '\\' OR EXISTS
            (SELECT 1 FROM turns WHERE session = sessions.id AND content LIKE ? ESCAPE '\\'))
            ORDER BY used DESC LIMIT ?"""
        with self._transaction() as db:
            rows = db.execute(query, (*[f"%{_clean(escaped)}%"] * 3, limit)).fetchall()
        with self._damage_named():
            return [
                RecordSummary(int(id), text(title), text(model), int(n), float(s)) for id, title, model, n, s in rows
            ]

    def find(self, wanted: str | None) -> Record:
        """The conversation with this number or title, else the last used whose title contains it; None: the last.

        A number matches no part of a title. Raises LocalqError (exit 2) where there is none.
        """
        is_number = wanted is not None and wanted.isascii() and wanted.isdigit() and len(wanted) < 19
        if wanted is not None and is_number:
            try:
                return self.load(int(wanted))
            except LocalqError as error:
                if error.exit_code != ExitCode.USAGE:
                    raise
        with self._transaction() as db:
            rows = db.execute("SELECT id, title FROM sessions WHERE deleted_s IS NULL ORDER BY used DESC").fetchall()
        titles, folded = {int(id): text(title).casefold() for id, title in rows}, (wanted or "").casefold()
        exact = [id for id, title in titles.items() if title == folded]
        found = exact or [id for id, title in titles.items() if folded in title and not is_number]
        if not found:
            raise _unknown(wanted)
        return self.load(found[0])

    def rename(self, id: int, title: str) -> None:
        """Set the title of a conversation. Raises LocalqError (exit 2) where there is none."""
        self._change(id, "UPDATE sessions SET title = ? WHERE id = ? AND deleted_s IS NULL", _clean(title))

    def delete(self, id: int) -> None:
        """Delete a conversation; `restore` undoes it within KEPT_S. Its snapshot is removed at once."""
        self._change(id, "UPDATE sessions SET deleted_s = ? WHERE id = ? AND deleted_s IS NULL", time.time())
        snapshot_files.remove(snapshot_files.snapshot_path(self.path, id))

    def ids(self) -> set[int]:
        """The numbers of all conversations."""
        with self._transaction() as db:
            return {int(id) for (id,) in db.execute("SELECT id FROM sessions WHERE deleted_s IS NULL")}

    def restore(self, id: int) -> None:
        """Undo `delete`."""
        self._change(id, "UPDATE sessions SET deleted_s = ? WHERE id = ?", None)

    # ---- inside

    def _change(self, id: int, statement: str, value: str | float | None) -> None:
        with self._transaction() as db:
            changed = db.execute(statement, (value, id)).rowcount
        if not changed:
            raise _unknown(str(id))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """An open database in one transaction: committed at the end of the block, rolled back if it raises."""
        with _ONE_AT_A_TIME, self._named():
            self._private()
            with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.text_factory = text  # text that is not valid is shown, too
                db.execute("PRAGMA synchronous = EXTRA")
                db.execute("PRAGMA secure_delete = ON")
                db.execute("BEGIN IMMEDIATE")
                try:
                    self._versioned(db)
                    yield db
                except BaseException:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")

    def _private(self) -> None:
        disk.make_folder(self.path.parent)
        # Only a new file: closing an existing one would release the locks that this process holds on it.
        with contextlib.suppress(FileExistsError), disk.new_file(self.path):
            pass
        found = self.path.stat()
        if found.st_mode & 0o077 and found.st_nlink == 1:  # by another name it may be anyone's file
            self.path.chmod(0o600)  # SQLite copies the mode to its journal

    def _versioned(self, db: sqlite3.Connection) -> None:
        (version,), (ours,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "application_id"))
        if version == 0 and not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(f"PRAGMA user_version = {SCHEMA}")
            db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        elif ours != APPLICATION_ID:
            raise bad_file(str(self.path), "not a localq conversation database", f"Move it out of the way. {_WITHOUT}")
        elif version != SCHEMA:
            why = f"the database was written by a newer version of localq (file version {version}; supported: {SCHEMA})"
            raise bad_file(str(self.path), why, f"Update localq. The file is unchanged. {_WITHOUT}")
        db.execute(_SUMMARIES)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk.disk_error(self.path, error) from error
        except sqlite3.Error as error:
            raise _sqlite_error(self.path, error) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes a damaged schema
            raise bad_file(str(self.path), "damaged (malformed schema)", _DAMAGED) from error

    @contextlib.contextmanager
    def _damage_named(self) -> Iterator[None]:
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError, LocalqError) as bad:
            raise bad_file(str(self.path), f"damaged ({type(bad).__name__})", _DAMAGED) from bad


def _insert(db: sqlite3.Connection, session: int, parent: int | None, turn: Turn) -> int:
    message = turn.message
    content, facts = _clean(message.content), turn_facts(turn)
    values = (session, parent, message.role, content, message.complete, turn.created_s, facts)
    row = db.execute("INSERT INTO turns VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", values).lastrowid
    assert row is not None
    return row


def _save_summaries(
    db: sqlite3.Connection, session: int, conversation: Conversation, rows: list[int], known: dict[TurnSummary, int]
) -> None:
    """Write new summaries and remove undone ones. known: summary -> row, updated."""
    for summary in [each for each in known if each not in conversation.summaries]:
        one = "SELECT upto FROM summaries WHERE id = ?"  # another process may have summarized the same turns
        db.execute(f"DELETE FROM summaries WHERE session = ? AND upto = ({one})", (session, known.pop(summary)))
    for summary in [each for each in conversation.summaries if each not in known]:
        values = (session, rows[summary.upto], rows[summary.made_at], _clean(summary.text))
        known[summary] = db.execute("INSERT INTO summaries VALUES (NULL, ?, ?, ?, ?)", values).lastrowid or 0


def _clean(text: str) -> str:
    """`text` without lone surrogates, which SQLite refuses."""
    return text.encode("utf-8", "replace").decode()


def _unknown(wanted: str | None) -> LocalqError:
    what = "--continue" if wanted is None else wanted
    why = "no saved conversations" if wanted is None else "no such conversation"
    return LocalqError(what, why, "To list the conversations, use /sessions in a chat.", ExitCode.USAGE)


def _sqlite_error(path: Path, error: sqlite3.Error) -> LocalqError:
    kind = getattr(error, "sqlite_errorname", "") or ""
    if kind.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        why = f"still locked by another process after {BUSY_S:g} s"
        return LocalqError(str(path), why, f"Wait for that process to finish, or stop it. {_WITHOUT}")
    if kind.startswith(("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        step = f"Check free space and permissions. {_WITHOUT}"
        return LocalqError(str(path), f"cannot be written ({error})", step, ExitCode.DISK)
    return bad_file(str(path), f"damaged ({error})", _DAMAGED)
