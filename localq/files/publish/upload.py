"""The upload itself: a repository, files of weights one after the other, and commits.

The client library makes the requests, over plain HTTPS as for downloads: Xet has no part in it. A file of weights goes
to the hub's store first; commits make files visible, the small files with `config.json` in the last one. So the
repository of an interrupted upload has no configuration, and no load takes it for a whole model. What replaces or
removes files of another model is one commit: the repository has the old model or the new one, never parts of both. The
same command sends what is missing: a file that is committed, or in the hub's store, is not sent again.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from localq import __version__, disk
from localq.errors import LocalqError
from localq.files import checked_files
from localq.files.hub import connection
from localq.files.hub import errors as hub_errors
from localq.files.publish import errors, remote_repo, upload_client
from localq.files.publish.card import CARD_NAME
from localq.files.publish.made_model import SentFile
from localq.files.publish.plan import PushPlan
from localq.wording import OnProgress

COMMIT_BYTES = 20 * 10**9  # of weights, after which they are committed: a repository then shows what it has
COMMIT_FILES = 50
SMALL_BYTES = 2**20  # smaller files are sent with the commit
REJECTED = 400  # HTTP status for a card with faults
_UPLOADING = "uploading"
Result = TypeVar("Result")


def push(plan: PushPlan, on_progress: OnProgress | None = None) -> str:
    """Send what the repository lacks; return its commit. The repository is created if need be.

    Raises LocalqError: exit 5 without a token that may write, 4 for an unknown organization, 6 for the network, 1 for a
    repository that changed meanwhile, 8 and 9 for a local file that changed or cannot be read.
    """
    upload = _Upload(plan, on_progress or (lambda what, done, total: None))
    with upload_client.checked_client(plan.request.repo), _quiet_library():
        return upload.run()


@contextlib.contextmanager
def _quiet_library() -> Iterator[None]:
    """Let the client library use plain HTTPS, and print no bars and no warnings."""
    library = connection.library()
    constants: Any = library.constants
    before = constants.HF_HUB_DISABLE_XET
    constants.HF_HUB_DISABLE_XET = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the library's own use of its HTTP library
            library.utils.disable_progress_bars()
            yield
    finally:
        constants.HF_HUB_DISABLE_XET = before


class _Upload:
    """One upload: the library's client, the last commit, and the bytes that were sent."""

    def __init__(self, plan: PushPlan, on_progress: OnProgress) -> None:
        self._plan, self._repo, self._on_progress = plan, plan.request.repo, on_progress
        self._commit_id, self._done, self._total = plan.remote.commit, 0, plan.send_bytes
        endpoint = hub_errors.endpoint().reveal()
        self._api: Any = connection.library().HfApi(
            endpoint=endpoint, token=False, library_name="localq", library_version=__version__
        )

    def run(self) -> str:
        plan = self._plan
        self._check_token()
        self._call(self._check_card)
        if not plan.remote.commit:
            self._commit_id = self._create()
        is_one_commit = bool(plan.replaced or plan.removed)
        waiting: list[tuple[SentFile, Any]] = []
        weights = [each for each in plan.to_send if each.path is not None and each.name.endswith(".safetensors")]
        for file in weights:
            waiting.append((file, self._store(file)))
            is_full = sum(each.size for each, _ in waiting) >= COMMIT_BYTES or len(waiting) >= COMMIT_FILES
            if is_full and not is_one_commit:
                self._commit(waiting, ())
                waiting = []
        for file in (each for each in plan.to_send if each not in weights):
            waiting.append((file, self._store(file) if file.size > SMALL_BYTES else _operation(file, _unwatched)))
        if waiting or plan.removed:
            self._commit(waiting, plan.removed)
        self._check_result()
        return self._commit_id

    def _check_token(self) -> None:
        if connection.access_token() is None:
            raise errors.no_token(self._repo)

    def _check_card(self) -> None:
        """Let the hub check the card before anything is sent. Raises LocalqError (exit 2)."""
        if all(each.name != CARD_NAME for each in self._plan.to_send):
            return
        library, token = connection.library(), self._options()["token"]
        answer = connection.open_session().post(
            f"{hub_errors.endpoint().reveal()}/api/validate-yaml",
            json={"content": self._plan.card, "repoType": "model"},
            headers=library.utils.build_hf_headers(token=token, library_name="localq", library_version=__version__),
        )
        if answer.status_code == REJECTED:
            raise errors.rejected_card(self._repo)
        library.utils.hf_raise_for_status(answer)
        answer.json()

    def _options(self) -> dict[str, Any]:
        """Repository and token of a call. The token is read for each, and kept in no attribute."""
        token = connection.access_token()
        return {"repo_id": self._repo, "token": token.reveal() if token is not None else False}

    def _create(self) -> str:
        """Create the repository; return its first commit. Raises LocalqError (exit 1) if another program made one."""
        private = self._plan.request.private
        # `exist_ok`: the answer to an earlier try may be lost. What the repository is then has to be asked.
        self._call(lambda: self._api.create_repo(private=private, exist_ok=True, **self._options()))
        remote = remote_repo.read(self._repo)
        if not remote.commit or remote.files or remote.private != private:
            raise errors.changed(self._repo)
        return remote.commit

    def _check_result(self) -> None:
        """Check that the repository has what was planned: the library leaves out files that a .gitignore names."""
        remote = remote_repo.read(self._repo)
        absent = [each.name for each in self._plan.files if not each.is_at(remote.files.get(each.name, ""))]
        if absent:
            why = f"after the upload the repository does not have {', '.join(absent)} as sent"
            step = f"Check {self._repo}/.gitignore and whether someone else changed the files. {errors.RESUME}"
            raise LocalqError(self._repo, why, step)
        if left := sorted(set(self._plan.removed) & remote.files.keys()):
            why = f"after the upload the repository still has {', '.join(left)}, of another model"
            raise LocalqError(self._repo, why, errors.RESUME)

    def _store(self, file: SentFile) -> Any:
        """Send a file to the hub's store, if it goes there; the operation that commits it."""
        begun = self._done

        def report(position: int) -> None:
            self._on_progress(f"{_UPLOADING} {file.name}", begun + min(position, file.size), self._total)

        operation = _operation(file, report)
        report(0)
        # The library tries again by itself; one more try starts the file anew.
        self._call(lambda: self._api.preupload_lfs_files(additions=[operation], **self._options()), tries=2)
        self._done = begun + file.size
        report(file.size)
        return operation

    def _commit(self, sent: Sequence[tuple[SentFile, Any]], removed: Sequence[str]) -> None:
        """Commit files, onto the commit that is known: another's commit in between is not overwritten."""
        delete = connection.library().CommitOperationDelete
        operations = [*(operation for _, operation in sent), *(delete(path_in_repo=name) for name in removed)]

        def commit() -> str:
            if self._is_there(sent, removed):  # the answer to an earlier try was lost
                return self._commit_id
            done = self._api.create_commit(
                operations=operations, commit_message=f"Upload {len(operations)} files with localq {__version__}",
                parent_commit=self._commit_id, **self._options(),
            )  # fmt: skip
            return str(done.oid)

        self._tried = False
        self._commit_id = self._call(commit)

    def _is_there(self, sent: Sequence[tuple[SentFile, Any]], removed: Sequence[str]) -> bool:
        """Return whether an earlier try of this commit succeeded; the first try does not ask."""
        tried, self._tried = self._tried, True
        if not tried:
            return False
        remote = remote_repo.read(self._repo)
        there = all(file.is_at(remote.files.get(file.name, "")) for file, _ in sent)
        if there and not set(removed) & remote.files.keys():
            self._commit_id = remote.commit
            return True
        return False

    def _call(self, call: Callable[[], Result], tries: int = len(hub_errors.PAUSES_S) + 1) -> Result:
        """Return `call()`, tried again after temporary failures. Raises LocalqError."""
        for pause_s in (*hub_errors.PAUSES_S[: tries - 1], None):
            try:
                return call()
            except LocalqError:
                raise
            except Exception as error:
                if pause_s is None or not errors.passes(error):
                    known = errors.translate(error, self._repo)
                    if known is error:
                        raise
                    raise known from None  # the library's message may have a signed address
                cause = errors.cause_of(error)
                assert isinstance(cause, Exception), "a temporary failure is one"
                hub_errors.pause_after(cause, pause_s)
        raise AssertionError("the last try returns or raises")


def _unwatched(position: int) -> None:
    """Ignore how far a small file was read."""


class _WatchedFile(io.FileIO):
    """A local file that reports how far it was read."""

    def __init__(self, path: Path, on_position: Callable[[int], None]) -> None:
        super().__init__(path)
        self._path, self._on_position = path, on_position

    def read(self, size: int | None = -1) -> bytes:
        """Read as a file does, and report the position. Raises LocalqError (exit 9)."""
        with disk.read_errors(self._path):
            found = super().read(-1 if size is None else size)
        self._on_position(self.tell())
        return found


def _operation(file: SentFile, on_position: Callable[[int], None]) -> Any:
    """The library's operation for adding `file`. Its hash is the one that was checked, so it is not computed again.

    Raises LocalqError: exit 9 for a file that cannot be read, 8 for one that changed.
    """
    base: Any = connection.library().CommitOperationAdd
    if file.path is None:
        return base(path_in_repo=file.name, path_or_fileobj=file.content)
    path = file.path
    if file.size <= SMALL_BYTES and not file.name.endswith(".safetensors"):
        return base(path_in_repo=file.name, path_or_fileobj=_content(file, path))

    class WatchedAddition(base):  # type: ignore[misc]
        @contextlib.contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[io.FileIO]:
            with disk.read_errors(path):
                opened = _WatchedFile(path, on_position)
            with opened:
                try:
                    yield opened
                finally:  # a failure of the request may come from the change
                    _check_unchanged(file, path)

    _check_unchanged(file, path)
    with disk.read_errors(path):
        found = WatchedAddition(path_in_repo=file.name, path_or_fileobj=str(path.absolute()))
    found.upload_info.sha256 = bytes.fromhex(file.sha256)
    return found


def _content(file: SentFile, path: Path) -> bytes:
    """The content of a small file, read once and compared with its hash."""
    with disk.read_errors(path):
        content = path.read_bytes() if path.stat().st_size == file.size else b""
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise errors.changed_file(path)
    return content


def _check_unchanged(file: SentFile, path: Path) -> None:
    with disk.read_errors(path):
        now = checked_files.stamp(path)
    if now != file.stamp:
        raise errors.changed_file(path)
