"""The requests of an upload, answered by the fake hub: create, preupload, LFS batch, parts, verify, commit.

A file of weights goes to the store (`Store.objects`) by one PUT, or by parts where it is larger than `part_bytes`; a
commit then names it. Small files are in the commit itself. Every commit is a new one of `FakeRepo.commits`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from typing import Any

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
INITIAL = {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"}
Reply = tuple[int, Any, dict[str, str]]  # status, body, headers


@dataclass
class Store:
    """What was uploaded.

    objects     sha256 -> content
    parts       (sha256, number) -> content of a part
    part_bytes  files that are larger are uploaded in parts; 0: none
    writers     tokens that may write
    committed   names of the files of every commit, in order
    private     repository -> whether it is private
    kept        files that no commit removes
    verify      address of the verification that the hub asks for after each file; "": none
    put_may_end  where it is set, a PUT sets `put_came`, and is answered only after this event
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    part_bytes: int = 0
    writers: frozenset[str] = frozenset()
    committed: list[list[str]] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    verify: str = ""
    put_came: threading.Event = field(default_factory=threading.Event)
    put_may_end: threading.Event | None = None


def answer(hub: Any, method: str, path: str, body: bytes, token: str) -> Reply:
    """The answer to a request that writes."""
    parts = path.strip("/").split("/")
    if method == "PUT" and parts[0] == "store":
        return _put(hub.store, parts, body)
    if parts[0] == "store":  # all parts are there
        return _complete(hub.store, parts[1], json.loads(body))
    if (refusal := _refusal(hub.store, token)) is not None:
        return refusal
    if parts == ["api", "repos", "create"]:
        return _create(hub, json.loads(body))
    if parts == ["api", "validate-yaml"]:
        return 200, {"errors": [], "warnings": []}, {}
    repo = "/".join(parts[2:4]) if parts[0] == "api" else "/".join(parts[:2]).removesuffix(".git")
    if repo not in hub.repos:
        return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
    if parts[4:5] == ["preupload"]:
        return _preupload(hub.repos[repo], json.loads(body))
    if parts[2:] == ["info", "lfs", "objects", "batch"]:
        return _batch(hub, json.loads(body))
    if parts[2:] == ["info", "lfs", "objects", "verify"]:
        asked = json.loads(body)
        return (200 if asked["oid"] in hub.store.objects else 404), {}, {}
    if parts[4:5] == ["commit"]:
        return _commit(hub, repo, [json.loads(line) for line in body.splitlines()])
    return 404, {}, {}


def _refusal(store: Store, token: str) -> Reply | None:
    if not token or token == "wrong":
        return 401, {"error": "Invalid credentials"}, {"X-Error-Message": "Invalid credentials in Authorization header"}
    if token not in store.writers:
        return 403, {"error": f"no write access for {token}"}, {}  # as a hostile hub may quote it
    return None


def _create(hub: Any, asked: dict[str, Any]) -> Reply:
    repo = f"{asked['organization']}/{asked['name']}"
    if repo in hub.repos:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, {}
    hub.add(repo, dict(INITIAL), commit=_commit_id(repo, "0"))
    hub.store.private[repo] = asked.get("visibility") == "private"
    return 200, {"url": f"{hub.url}/{repo}"}, {}


def _preupload(repo: Any, asked: dict[str, Any]) -> Reply:
    now = repo.commits[repo.commit("main")]
    files, ignored = [], now.get(".gitignore", b"").decode().split()
    for file in asked["files"]:
        name = file["path"]
        mode = "lfs" if name.endswith(LFS_SUFFIXES) else "regular"
        found = {"path": name, "uploadMode": mode, "shouldIgnore": name in ignored}
        if name in now:
            found["oid"] = _sha256(now[name]) if mode == "lfs" else _git_id(now[name])
        files.append(found)
    return 200, {"files": files}, {}


def _batch(hub: Any, asked: dict[str, Any]) -> Reply:
    objects = []
    for each in asked["objects"]:
        oid, size = each["oid"], each["size"]
        found: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in hub.store.objects:
            found["actions"] = {"upload": _upload(hub, oid, size)}
            if hub.store.verify:
                found["actions"]["verify"] = {"href": hub.store.verify}
        objects.append(found)
    return 200, {"objects": objects, "transfer": "multipart" if hub.store.part_bytes else "basic"}, {}


def _upload(hub: Any, oid: str, size: int) -> dict[str, Any]:
    signed = "X-Amz-Signature=signed-and-secret"
    part = hub.store.part_bytes
    if not part or size <= part:
        return {"href": f"{hub.url}/store/{oid}?{signed}"}
    numbers = range(1, -(-size // part) + 1)
    urls = {str(number): f"{hub.url}/store/{oid}/{number}?{signed}" for number in numbers}
    return {"href": f"{hub.url}/store/{oid}/complete?{signed}", "header": {"chunk_size": str(part), **urls}}


def _put(store: Store, parts: list[str], body: bytes) -> Reply:
    if len(parts) == 3:
        store.parts[parts[1], int(parts[2])] = body
        return 200, {}, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
    if _sha256(body) != parts[1]:
        return 400, {"error": "other content"}, {}
    store.objects[parts[1]] = body
    return 200, {}, {"ETag": '"whole"'}


def _complete(store: Store, oid: str, asked: dict[str, Any]) -> Reply:
    numbers = [each["partNumber"] for each in asked["parts"]]
    whole = b"".join(store.parts[oid, number] for number in numbers)
    if _sha256(whole) != oid:
        return 400, {"error": "other content"}, {}
    store.objects[oid] = whole
    return 200, {}, {}


def _commit(hub: Any, name: str, operations: list[dict[str, Any]]) -> Reply:
    repo, header = hub.repos[name], operations[0]["value"]
    before = repo.commit("main")
    if header.get("parentCommit") not in (None, before):
        return 412, {"error": "A commit has happened since"}, {}
    files, lfs, names = dict(repo.commits[before]), set(repo.lfs), []
    for each in operations[1:]:
        value = each["value"]
        if each["key"] == "deletedFile":
            if value["path"] not in hub.store.kept:
                files.pop(value["path"], None)
            continue
        names.append(value["path"])
        if each["key"] == "lfsFile":
            if value["oid"] not in hub.store.objects:
                return 400, {"error": "no such object"}, {}
            files[value["path"]] = hub.store.objects[value["oid"]]
            lfs.add(value["path"])
        else:
            files[value["path"]] = base64.b64decode(value["content"])
    commit = _commit_id(before, *sorted(files))
    repo.commits[commit], repo.refs["main"], repo.lfs = files, commit, frozenset(lfs)
    hub.store.committed.append(sorted(names))
    return 200, {"commitOid": commit, "commitUrl": f"{hub.url}/{name}/commit/{commit}"}, {}


def _commit_id(*parts: str) -> str:
    return hashlib.sha1("\n".join(parts).encode()).hexdigest()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
