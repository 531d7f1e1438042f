"""A model hub on the loopback address: the requests that huggingface_hub makes for models, faults on demand.

Answers GET /api/models/ORG/REPO[/revision/REV]?blobs=true and HEAD, GET /ORG/REPO/resolve/REV/FILE with Range, ETag,
X-Repo-Commit and the X-Linked headers of LFS files, in the status codes and headers of the real hub. Every request is
recorded, with the bytes sent. `fail` scripts answers, `other_content` swaps content, `cdn` is a second host. Uploads
are answered by `hub_writes`, and go to `store`.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socket
import sys
import threading
import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.support.files import hub_writes

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeRepo:
    """A repository: commit -> file -> content. `lfs` are the names that the hub stores as LFS files."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    lfs: frozenset[str]
    gated: str | bool = False
    allowed_tokens: frozenset[str] = frozenset()
    card: dict[str, Any] = field(default_factory=dict)  # the front matter of its model card

    def commit(self, revision: str) -> str | None:
        found = self.refs.get(revision, revision)
        return found if found in self.commits else None


@dataclass
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0  # of the answer


@dataclass
class Fault:
    """One scripted answer for a request whose "METHOD path range" contains `where`; "whole" is no range."""

    where: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    cut_after: int | None = None  # instead of a status: send only so many bytes of the body, then hang up
    how: str = (
        ""  # "stall" after `cut_after`; "whole" (no Range), "shifted" or "resized" ranges, "short" (no length); "html"
    )


class FakeHub:
    """Use as a context manager; `url` is what HF_ENDPOINT must be."""

    def __init__(self) -> None:
        self.repos: dict[str, FakeRepo] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.other_content: dict[str, bytes] = {}
        self.cdn: FakeHub | None = None
        self.slow_after: int | None = None  # bytes of a body after which it trickles
        self.etag = ""  # what it is called, where that is not its hash
        self.sent: dict[str, int] = {}  # path -> bytes of bodies that were sent
        self._going = threading.Event()  # set when it ends
        self.blobs: dict[str, bytes] = {}  # what this host serves as a CDN
        self.store = hub_writes.Store()
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._open: set[Any] = set()  # addresses of clients that are connected

    def __enter__(self) -> FakeHub:
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = _Server(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._going.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def add(self, repo: str, files: dict[str, bytes], commit: str = COMMIT, **options: Any) -> FakeRepo:
        """A repository (or a further commit of one) whose "main" is `commit`."""
        lfs = frozenset(name for name in files if name.endswith((".safetensors", ".gguf", ".bin")))
        known = self.repos.get(repo) or FakeRepo({}, {}, frozenset(), **options)
        known.commits[commit], known.refs["main"], known.lfs = files, commit, known.lfs | lfs
        self.repos[repo] = known
        return known

    def fail(
        self, where: str, *statuses: int, cut_after: int | None = None, how: str = "", times: int = 1, **headers: str
    ) -> None:
        """Answer the next requests that contain `where` with these statuses, in this order; or with faulty bodies."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.faults += [Fault(where, each, named, cut_after, how) for each in statuses or (200,) * times]

    def seen(self, method: str, part: str = "") -> list[Request]:
        return [each for each in self.requests if each.method == method and part in each.path]

    def fetched(self) -> list[str]:
        """The names of the files that were downloaded, in order; not those that were refused."""
        given = [each for each in self.seen("GET", "/resolve/") if each.status in (200, 206, 302)]
        return [urllib.parse.unquote(each.path.rpartition("/")[2]) for each in given]

    def count(self, path: str, sent: int) -> None:
        with self._lock:
            self.sent[path] = self.sent.get(path, 0) + sent

    def sent_of(self, name: str) -> int:
        """Bytes of the file `name` that were sent."""
        return sum(sent for path, sent in self.sent.items() if path.endswith(f"/{name}"))

    def settle(self) -> None:
        """Wait until all connections made so far have ended, where their clients have: then all bytes are counted.

        A request that a killed client has left behind may still wait to be accepted, read and answered.
        """
        with socket.create_connection(self.server.server_address[:2]) as last:  # accepted after all others
            place = last.getsockname()
            self._wait(lambda: place in self._open, "the hub accepts no connections")
        self._wait(lambda: not self._open, "connections are open, so a client has not ended")

    def _wait(self, condition: Callable[[], bool], why: str) -> None:
        with self._changed:
            if not self._changed.wait_for(condition, 60):
                raise TimeoutError(why)

    def set_open(self, place: Any, is_open: bool) -> None:
        """place: a client's address, of a connection that was accepted or has ended."""
        with self._changed:
            (self._open.add if is_open else self._open.discard)(place)
            self._changed.notify_all()

    def note(self, request: Request) -> Fault | None:
        """Record a request and take the fault that waits for it."""
        with self._lock:
            self.requests.append(request)
            for fault in self.faults:
                if fault.where in f"{request.method} {request.path} {request.headers.get('range', 'whole')}":
                    self.faults.remove(fault)
                    return fault
        return None


class _Server(http.server.ThreadingHTTPServer):
    hub: FakeHub

    def process_request(self, request: Any, client_address: Any) -> None:
        self.hub.set_open(client_address, True)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.hub.set_open(client_address, False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up, being killed perhaps, is no news."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else small answers, sent in two pieces, wait 40 ms for each other
    hub: FakeHub

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are recorded, not printed."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._write_answer()

    def do_PUT(self) -> None:
        self._write_answer()

    def _write_answer(self) -> None:
        """Answer a request with a body. A fault with `cut_after` reads so much of it and hangs up."""
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_seen = Request(self.command, self.path, headers)
        fault = self.hub.note(self.request_seen)
        self.fault = None
        size = int(headers.get("content-length", 0))
        if fault is not None and fault.cut_after is not None:
            self.rfile.read(min(size, fault.cut_after))
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        body = self.rfile.read(size)
        token = headers.get("authorization", "").removeprefix("Bearer ")
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        if fault is not None and fault.how != "late":  # "late": it is done, and the answer is lost
            self._send(fault.status, b"<html></html>" if fault.how == "html" else b"{}", fault.headers)
            return
        if self.command == "PUT" and self.hub.store.put_may_end is not None:
            self.hub.store.put_came.set()
            self.hub.store.put_may_end.wait(60)
        with self.hub._lock:
            status, found, more = hub_writes.answer(self.hub, self.command, path, body, token)
        if fault is not None:
            status, found, more = fault.status, {}, fault.headers
        self._send(status, json.dumps(found).encode(), {"Content-Type": "application/json", **more})

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_seen = Request(self.command, self.path, headers)
        fault = self.fault = self.hub.note(self.request_seen)
        if fault is not None and fault.cut_after is None and not fault.how:
            self._send(fault.status, b"", fault.headers)
            return
        parts = [urllib.parse.unquote(part) for part in urllib.parse.urlsplit(self.path).path.strip("/").split("/")]
        if parts[0] == "blob" and parts[1] in self.hub.blobs:
            self._send_body(self.hub.blobs[parts[1]], {"ETag": f'"{parts[1]}"'})
        elif parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._send(404, b"", {})

    def _repo(self, name: str, revision: str, content: bool) -> tuple[FakeRepo, str] | None:
        """The repository and the commit; None where the refusal was sent."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        repo = self.hub.repos.get(name)
        if token == "wrong":
            self._send(401, b"", {"X-Error-Message": "Invalid credentials in Authorization header"})
        elif repo is None:
            self._send(404 if token else 401, b"", {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and content and token not in repo.allowed_tokens:
            self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        elif (commit := repo.commit(revision)) is None:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repo, commit
        return None

    def _info(self, name: str, revision: str) -> None:
        found = self._repo(name, revision, content=False)
        if found is None:
            return
        repo, commit = found
        siblings = []
        for file, content in repo.commits[commit].items():
            sibling: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": git_id(content)}
            if file in repo.lfs:
                sibling["lfs"] = {"size": len(content), "sha256": sha256(content), "pointerSize": 134}
            siblings.append(sibling)
        body = {"id": name, "modelId": name, "sha": commit, "gated": repo.gated, "cardData": repo.card}
        body["private"] = self.hub.store.private.get(name, False)
        self._send(200, json.dumps({**body, "siblings": siblings}).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._repo(name, revision, content=True)
        if found is None:
            return
        repo, commit = found
        listed = repo.commits[commit].get(file)
        if listed is None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = self.hub.other_content.get(file, listed)
        etag = self.hub.etag or (sha256(listed) if file in repo.lfs else git_id(listed))
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if file in repo.lfs:
            headers |= {"X-Linked-ETag": f'"{etag}"', "X-Linked-Size": str(len(listed))}
            if self.hub.cdn is not None:
                self.hub.cdn.blobs[etag] = content
                self._send(302, b"", {**headers, "Location": f"{self.hub.cdn.url}/blob/{etag}"})
                return
        self._send_body(content, headers)

    def _send_body(self, content: bytes, headers: dict[str, str]) -> None:
        status, start, size = 200, 0, len(content)
        asked, how = self.headers.get("Range", ""), self.fault.how if self.fault else ""
        same = self.headers.get("If-Range", headers["ETag"]) == headers["ETag"]
        if asked.startswith("bytes=") and how != "whole" and same:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, size) if last else size
            if start >= size:
                self._send(416, b"", {"Content-Range": f"bytes */{size}"})
                return
            start = start // 2 if how == "shifted" else start
            status, said = 206, size + 7 if how == "resized" else size
            headers = {**headers, "Content-Range": f"bytes {start}-{stop - 1}/{said}"}
            content = content[:stop]
        self._send(status, memoryview(content)[start:], headers)

    def _send(self, status: int, body: bytes | memoryview, headers: dict[str, str]) -> None:
        cut, how = (self.fault.cut_after, self.fault.how) if self.fault else (None, "")
        self.request_seen.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if how == "short":
            self.send_header("Connection", "close")  # the end of the body is where the connection ends
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(ConnectionError):  # the client may hang up at any time
                self._write(body if cut is None else body[:cut])
        if how == "stall":
            self.hub._going.wait(60)
        if cut is not None:
            self.close_connection = True

    def _write(self, body: bytes | memoryview) -> None:
        body = memoryview(body)
        swift = len(body) if self.hub.slow_after is None else self.hub.slow_after
        for start in (*range(0, swift, 2**18), *range(swift, len(body), 2**16)):
            piece = body[start : min(start + 2**18, swift) if start < swift else start + 2**16]
            if start >= swift:
                self.hub._going.wait(0.02)
            self.hub.count(self.path, len(piece))  # before a client can have it, and look
            try:
                self.wfile.write(piece)
            except OSError:
                self.hub.count(self.path, -len(piece))
                raise


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def safetensors(seed: int, values: int = 700) -> bytes:
    """A sound safetensors file with one tensor of bytes, other bytes for another seed."""
    header = json.dumps({f"t{seed}": {"dtype": "U8", "shape": [values], "data_offsets": [0, values]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes((seed + i) % 251 for i in range(values))


# As little as tells a shape.
CONFIG = {
    "model_type": "llama", "dtype": "bfloat16", "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 1, "vocab_size": 32, "max_position_embeddings": 128,
}  # fmt: skip


def model_files(shards: int = 1) -> dict[str, bytes]:
    """The files of a small model that localq reads, in `shards` files of weights."""
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"temperature": 0.6}',
        "tokenizer.json": b'{"version": "1.0"}',
        "tokenizer_config.json": b"{}",
        "special_tokens_map.json": b'{"eos_token": "</s>"}',
        "chat_template.jinja": b"{{ messages }}",
    }
    if shards == 1:
        return {**files, "model.safetensors": safetensors(1)}
    names = [f"model-{i:05d}-of-{shards:05d}.safetensors" for i in range(1, shards + 1)]
    weights = {name: safetensors(i, 400 + 100 * i) for i, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": {f"t{i}": name for i, name in enumerate(names)}}
    return {**files, **weights, "model.safetensors.index.json": json.dumps(index).encode()}
