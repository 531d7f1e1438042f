"""What `localq push` would send: the model's files, the card and the licence's texts, beside what the hub has.

Everything that forbids an upload is found here, before the first byte is sent.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, checked_files
from localq.files.hub import cache as hub_cache
from localq.files.hub import client, connection, layout
from localq.files.hub.errors import endpoint
from localq.files.publish import licences, made_model, remote_repo
from localq.files.publish.card import CARD_NAME, CardFacts, card
from localq.files.publish.licences import Terms
from localq.files.publish.made_model import LICENCE_TEXT, MAX_LICENCE_BYTES, MadeModel, SentFile
from localq.files.publish.remote_repo import RemoteRepo
from localq.files.safetensors_headers import INDEX_NAME
from localq.wording import OnProgress, human_bytes

NOTICE_NAME, LICENCE_NAME = "NOTICE", "LICENSE"
_CHANGED = "The weights were changed: quantized to {} by localq.\n"


@dataclass(frozen=True)
class PushRequest:
    """A model folder, where it goes, and what the user says about it.

    base, licence   of the source model; "" for what the record and the hub say
    measured        results of `localq eval`, for the card
    private         of a repository that is created
    force           replace what the repository has of other models
    offline         compare with nothing on the hub; only for a dry run
    """

    folder: Path
    repo: str
    base: str = ""
    licence: str = ""
    measured: Mapping[str, str] = field(default_factory=dict)
    private: bool = False
    force: bool = False
    offline: bool = False


@dataclass(frozen=True)
class PushPlan:
    """The upload of one model.

    files     all that the repository has in the end, the files of weights first
    to_send   those of `files` that it does not have yet
    replaced  names of files that it has with another content
    removed   names of files of another model that a load would read: they go with `force`
    """

    request: PushRequest
    model: MadeModel
    base: str
    terms: tuple[Terms, ...]
    remote: RemoteRepo
    files: tuple[SentFile, ...]
    to_send: tuple[SentFile, ...]
    replaced: tuple[str, ...]
    removed: tuple[str, ...]
    card: str

    @property
    def send_bytes(self) -> int:
        """Bytes to send."""
        return sum(each.size for each in self.to_send)

    @property
    def licence(self) -> str:
        """The ids of the licences."""
        return ", ".join(each.id for each in self.terms)

    @property
    def private(self) -> bool:
        """True if only its owner sees the repository; an existing one keeps its own setting."""
        return self.remote.private if self.remote.commit else self.request.private


def plan(request: PushRequest, on_progress: OnProgress | None = None) -> PushPlan:
    """The upload that `request` asks for; its files are hashed if they changed since they were last.

    Raises LocalqError: exit 1 for a licence that forbids it; 2 for a folder that localq did not make, an unknown
    licence, a name that the licence does not allow, and a repository that has something else; 8 for an unfinished or
    damaged model; 4, 5 and 6 as requests to the hub.
    """
    repo, folder = request.repo, str(request.folder)
    check_names(request)
    model = made_model.open_made(request.folder, on_progress)
    base = request.base or (model.record.repo if model.record is not None else "")
    if base and not request.base:
        _check_name(base, f"source {base}", "Name the source model with --base ORG/REPO.")
    terms = tuple(licences.terms_of(id) for id in _licence_ids(request, model, base))
    for each in terms:
        licences.check(each, base or folder, repo)
    texts = _licence_files(request, model, base, terms)
    text = card(_facts(request, model, base, terms))
    own = {each.name: each for each in (*model.files, *texts, _made_file(CARD_NAME, text))}
    files = tuple(sorted(own.values(), key=lambda each: (not _is_weights(each.name), each.name)))
    remote = RemoteRepo(repo) if request.offline else remote_repo.read(repo)
    if request.private and remote.commit and not remote.private:
        step = f"Make it private at {endpoint()}/{repo}/settings, choose another name, or leave out --private."
        raise usage_error(repo, "--private: the repository exists and is public", step)
    found = _compare(request, model, base, terms, remote, files, text)
    if (found.replaced or _foreign(found)) and not request.force:
        raise _taken(found)
    return found


def check_names(request: PushRequest) -> None:
    """Raise LocalqError (exit 2) for names of repositories that the hub does not allow."""
    _check_name(request.repo, request.repo, "Use ORG/REPO, such as YOUR-NAME/my-model-vq2.")
    if request.base:
        _check_name(request.base, f"--base {request.base}", "Use ORG/REPO.")


def _check_name(repo: str, what: str, step: str) -> None:
    if not catalog.is_repo(repo):
        raise usage_error(what, "not the name of a repository", step)
    utils: Any = connection.library().utils
    try:
        utils.validate_repo_id(repo)
    except ValueError:  # as the library's own error is; its rules are these
        rule = "at most 96 characters, no -- or .., no - or . at either end, and not ending in .git"
        why = f"the hub does not allow this name (the rule: {rule})"
        raise usage_error(what, why, step) from None


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _facts(request: PushRequest, model: MadeModel, base: str, terms: tuple[Terms, ...]) -> CardFacts:
    return CardFacts(
        request.repo, base, terms, model.format, model.scheme, model.weights_bytes, model.parameters, model.bits,
        model.all_bits, model.record, request.measured,
    )  # fmt: skip


# ---- the licence


def _licence_ids(request: PushRequest, model: MadeModel, base: str) -> tuple[str, ...]:
    """The ids of the source's licences: the hub's, else the recorded one, else those of `--license`.

    Raises LocalqError (exit 2) where they are not known, for a `--license` that contradicts them, and for an id whose
    terms localq does not know and `--license` does not name.
    """
    what = base or str(request.folder)
    stated = remote_repo.stated_licences(base) if base and not request.offline else ()
    if not stated and model.record is not None and base == model.record.repo:
        stated = licences.ids_of(model.record.licence)
    named = licences.ids_of(request.licence, stated)
    if stated and not set(named) <= set(stated):
        why = f"the licence of {what} is {', '.join(stated)}"
        raise usage_error(f"--license {request.licence}", why, "Remove the option.")
    if not named and not stated:
        step = "Look it up on the source model's page, then use --license ID, such as --license apache-2.0."
        raise usage_error(what, "the licence of the source model is not known", step)
    unknown = [id for id in stated if not licences.terms_of(id).is_known]
    if not set(unknown) <= set(named):
        why = f"localq does not know the terms of its licence, {', '.join(unknown)}"
        option = f"--license {shlex.quote(','.join(unknown))}"
        step = f"Read them on the source model's page. If they allow redistribution, use {option}."
        raise usage_error(what, why, step)
    return stated or named


def _licence_files(request: PushRequest, model: MadeModel, base: str, terms: tuple[Terms, ...]) -> list[SentFile]:
    """Texts of the licences that the folder lacks: those of the source's repository, and the notices.

    Raises LocalqError (exit 2) where the licence requires a copy of itself and none is to be had.
    """
    here = {each.name for each in model.files if LICENCE_TEXT.fullmatch(each.name)}
    found = {} if request.offline or not base else _texts_of(base, here)
    copies = [name for name in (*here, *found) if name.startswith(("LICEN", "COPYING"))]
    needed = next((each for each in terms if each.copy), None)
    if needed is not None and not copies and not request.offline:
        why = f"the {needed.name} requires including a copy of its text, but the source has no {LICENCE_NAME} file"
        step = f"Save the text of {needed.source} as {request.folder / LICENCE_NAME}."
        raise usage_error(base or str(request.folder), why, step)
    for notice in (each.notice for each in terms if each.notice):
        text = found.get(NOTICE_NAME) or model.text_of(NOTICE_NAME) or ""
        if notice not in text:
            text = "\n".join(filter(None, (text.rstrip(), notice, _CHANGED.format(model.format))))
        found[NOTICE_NAME] = text
    return [_made_file(name, text) for name, text in found.items()]


def _texts_of(base: str, without: set[str]) -> dict[str, str]:
    """Name -> content of the licence's texts in the repository of the source model; {} where they are closed."""
    found = {}
    try:
        listing = client.list_files(base, "main")
        for name, file in listing.files.items():
            if LICENCE_TEXT.fullmatch(name) and name not in without and file.size <= MAX_LICENCE_BYTES:
                found[name] = client.first_bytes(listing, file, file.size).decode(errors="replace")
    except LocalqError as error:
        if error.exit_code not in (ExitCode.UNKNOWN_MODEL, ExitCode.GATED):  # renamed, or not open to this user
            raise
    return found


def _made_file(name: str, text: str) -> SentFile:
    content = text.encode()
    git_sha1 = hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return SentFile(name, len(content), hashlib.sha256(content).hexdigest(), git_sha1, None, content)


# ---- the repository


def _compare(
    request: PushRequest, model: MadeModel, base: str, terms: tuple[Terms, ...], remote: RemoteRepo,
    files: tuple[SentFile, ...], text: str,
) -> PushPlan:  # fmt: skip
    missing = tuple(each for each in files if not each.is_at(remote.files.get(each.name, "")))
    names = {each.name for each in files}
    found = PushPlan(
        request, model, base, terms, remote, files, missing,
        tuple(each.name for each in missing if each.name in remote.files), (), text,
    )  # fmt: skip
    return replace(found, removed=tuple(name for name in _foreign(found) if _is_read(name) and name not in names))


def _foreign(plan: PushPlan) -> list[str]:
    """Names of files of the repository that are not part of this model."""
    names = {each.name for each in plan.files}
    return sorted(name for name in plan.remote.files if name not in names)


def _is_read(name: str) -> bool:
    """Return whether a load reads files of this name."""
    own = (INDEX_NAME, checked_files.SUMS_NAME, hub_cache.MARKER_NAME)
    return name in own or (_is_weights(name) and "/" not in name) or layout.SMALL_FILES.fullmatch(name) is not None


def _taken(plan: PushPlan) -> LocalqError:
    """The error (exit 2) for a repository with other files."""
    other = [*plan.replaced, *_foreign(plan)]
    rest = f" and {len(other) - 1} more" if len(other) > 1 else ""
    why = f"the repository already has different content: {other[0]}{rest}"
    return usage_error(
        plan.request.repo, why, "Choose another name, or use --force to replace the model in the repository."
    )


# ---- for the user


def summary(plan: PushPlan) -> list[str]:
    """Repository, source, licence and size of the upload as lines, and files that it replaces or removes."""
    state = "exists" if plan.remote.commit else "not compared with the hub" if plan.request.offline else "new"
    kind = "private" if plan.private else "public"
    found = [
        f"repository  {plan.request.repo} ({kind}, {state})",
        f"source      {plan.base or 'not recorded'}",
        f"licence     {', '.join(f'{each.id} ({each.name})' if each.is_known else each.id for each in plan.terms)}",
        f"to send     {human_bytes(plan.send_bytes)} in {count(len(plan.to_send))} of {len(plan.files)}",
    ]
    found += [f"replaces    {', '.join(plan.replaced)}"] if plan.replaced else []
    return found + ([f"removes     {', '.join(plan.removed)}"] if plan.removed else [])


def lines(plan: PushPlan) -> list[str]:
    """The summary, and every file with what becomes of it."""
    found, width = [*summary(plan), ""], max(len(each.name) for each in plan.files)
    for each in plan.files:
        what = "there already" if each not in plan.to_send else "replaced" if each.name in plan.replaced else "new"
        found.append(f"{each.name:<{width}}  {human_bytes(each.size):>8}  {what}")
    return found


def catalogue_source(plan: PushPlan, commit: str) -> str:
    """The [[model.source]] table that names the uploaded model in a catalogue."""
    read = [each for each in plan.files if _is_weights(each.name) or _is_read(each.name)]
    fields = {"format": plan.model.format, "repo": plan.request.repo, "revision": commit}
    fields |= {"scheme": plan.model.scheme} if plan.model.scheme else {}
    fields |= {"licence": plan.licence}
    size = sum(each.size for each in read if each.name != checked_files.SUMS_NAME)
    rows = [*(f"{key} = {json.dumps(value)}" for key, value in fields.items()), f"bytes = {size}", "verified = true"]
    return "\n".join(["[[model.source]]", *rows, ""])


def count(files: int) -> str:
    """A number of files in words."""
    return f"{files} file{'s' * (files != 1)}"
