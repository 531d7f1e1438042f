"""Hostile runs, kind `hub`: answers that no sound hub gives, to a user with a token, a password and a shared cache."""

from __future__ import annotations

import functools
import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.cli.hostile_sequences import ACTING
from tests.support.files import fake_hub
from tests.tools import hostile_draws as draws
from tests.tools.hostile_process import Plan
from tests.tools.hostile_scratch import Scratch, holds, quoted_url
from tests.tools.mutations import damaged, damaged_bytes

REPO = "maker/tiny"
LATIN = "\xe9\xff\x9b31m"
HEADERS = ("Location", "ETag", "X-Repo-Commit", "X-Linked-ETag", "X-Linked-Size", "X-Error-Message", "X-Error-Code",
           "Content-Type", "Retry-After", "Content-Range", "Content-Encoding", "Set-Cookie", "Link")  # fmt: skip
Answer = Callable[[Any, "HostileHub"], None]


class HostileHub(fake_hub.FakeHub):
    """A fake hub with answers of its own: each is taken for requests that contain `where`, `times` times."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[list[Any]] = []

    def __enter__(self) -> HostileHub:
        super().__enter__()
        hub = self

        class Handler(self.server.RequestHandlerClass):  # type: ignore[misc, name-defined]
            def _answer(self) -> None:
                for each in hub.answers:
                    where, times, answer = each
                    if where in f"{self.command} {self.path}" and times:
                        each[1] -= 1
                        headers = {name.lower(): value for name, value in self.headers.items()}
                        hub.requests.append(fake_hub.Request(self.command, self.path, headers))
                        self.close_connection = True
                        return answer(self, hub)
                return super()._answer()

        # A client that hangs up in the middle of an answer ends only that answer.
        self.server.handle_error = lambda request, address: None
        self.server.RequestHandlerClass = Handler
        return self

    def says(self, where: str, answer: Answer, times: int = 99) -> None:
        """Give this answer from now on."""
        self.answers.append([where, times, answer])


def raw(status: int, body: bytes = b"", told: int | None = None, **headers: str) -> Answer:
    """Any status, headers (in Latin-1, whatever they hold but line ends) and body; told: its length as stated."""

    def answer(handler: Any, hub: HostileHub) -> None:
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body) if told is None else told}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        text = "\r\n".join([*lines, "", ""])
        handler.wfile.write(text.encode("latin-1", "replace") + (b"" if handler.command == "HEAD" else body))

    return answer


def endless(handler: Any, hub: HostileHub) -> None:
    """Blanks, in pieces, without an end."""
    handler.wfile.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(2000):
        handler.wfile.write(b"100000\r\n" + b" " * 2**20 + b"\r\n")


def many_headers(handler: Any, hub: HostileHub) -> None:
    """Header lines without an end."""
    handler.wfile.write(b"HTTP/1.1 200 X\r\n")
    for number in range(100_000):
        handler.wfile.write(b"X-%d: %s\r\n" % (number, b"a" * 1000))


def silent(handler: Any, hub: HostileHub) -> None:
    """Nothing, for as long as the hub lives."""
    hub._going.wait(60)


def trickle(handler: Any, hub: HostileHub) -> None:
    """A byte at a time."""
    handler.wfile.write(b"HTTP/1.1 200 X\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n")
    while not hub._going.wait(0.3):
        handler.wfile.write(b" ")


def echo(handler: Any, hub: HostileHub) -> None:
    """What the request brought, in the places from which a client takes its words."""
    said = " ".join(f"{name}={value}" for name, value in handler.headers.items())
    body = json.dumps({"error": said}).encode()
    raw(403, body, X_Error_Message=said, X_Error_Code=said, ETag=said, Location=f"http://{said}/")(handler, hub)


@functools.cache
def blanks() -> bytes:
    """300 MB of them in 300 kB: seconds of work, which a run must not wait for."""
    return gzip.compress(b" " * 3 * 10**8, 1)


def packed(handler: Any, hub: HostileHub) -> None:
    """300 MB of blanks in 300 kB."""
    raw(200, blanks(), Content_Encoding="gzip", Content_Type="application/json")(handler, hub)


def listing(rng: random.Random, files: dict[str, bytes]) -> dict[str, Any]:
    """What the hub tells of the repository, before it is damaged."""
    siblings = [{"rfilename": name, "size": len(content), "blobId": fake_hub.git_id(content)}
                for name, content in files.items()]  # fmt: skip
    odd = ("../../../escaped", "/etc/passwd", "a/../../b", ".", "..", "", "\0", "config.json", "CON", "a" * 300)
    for name in rng.sample([*odd, *ACTING.values()], 4):
        siblings.append({"rfilename": name, "size": rng.choice((0, 10, -1, 2**63, "x")), "blobId": "0" * 40})
    told = {"id": REPO, "modelId": REPO, "sha": fake_hub.COMMIT, "gated": False, "private": False}
    return {**told, "siblings": siblings}


def plan(rng: random.Random, scratch: Scratch) -> Plan:
    """A command that asks the hub, and what it gets."""
    blanks()
    hub, other = HostileHub().__enter__(), HostileHub().__enter__()
    files = fake_hub.model_files(rng.choice((1, 1, 3)))
    files |= {name: (draws.sound_model(scratch.root / "made") / name).read_bytes() for name in ("config.json",)}
    hub.add(REPO, files)
    trap, patience = _set(rng, hub, other, files, scratch)
    port = hub.server.server_address[1]
    from_file = any(each in trap for each in (" token is ", " stored_tokens is "))
    token = scratch.secrets.token if rng.random() < 0.7 and not from_file else None
    environment = {
        "HF_ENDPOINT": quoted_url(scratch.secrets, port), "HF_HUB_OFFLINE": None, "HF_TOKEN": token,
    }  # fmt: skip

    def elsewhere() -> list[str]:
        parts = [part for each in scratch.secrets.credentials().values() for part in each]
        return [each.path for each in other.requests if holds(repr(each.headers).encode(), parts)]

    def close() -> None:
        for each in (hub, other):
            each.__exit__()

    drawn = _command(rng, scratch)
    if drawn[0] == "chat":
        return Plan(drawn, trap, environment, keys=["hello\r", "\x1b", "\x1b[B"], close=close,
                    foreign_requests=elsewhere, may_tell=True)  # fmt: skip
    return Plan(drawn, trap, environment, patience=patience, close=close, foreign_requests=elsewhere)


def _command(rng: random.Random, scratch: Scratch) -> list[str]:
    where = rng.choice((REPO, REPO, REPO, REPO, f"{REPO}@bf16", "maker/../tiny", f"maker/{draws.name(rng)[:40]}"))
    return rng.choice((
        ["pull", where, "-y"], ["pull", where, "-y"], ["pull", where, "-y", "--force"], ["pull", where, "-y", "--json"],
        ["pull", where, "--dry-run"], ["fit", where, "--vram", "24"], ["run", where, "hello", "--dry-run", "-y"],
        ["pull", where, "-y", "--revision", draws.argument(rng)], ["quantize", where, "-o", "not there/made", "-y"],
        ["chat", where, "-y"] if rng.random() < 0.3 else ["pull", where, "-y"], ["pull", where, where, "-y", "-q"],
    ))  # fmt: skip


def _set(
    rng: random.Random, hub: HostileHub, other: HostileHub, files: dict[str, bytes], scratch: Scratch
) -> tuple[str, float | None]:
    """Let the hub do one hostile thing; what, and after how many seconds of waiting the user has enough."""
    where = rng.choice(("/api/models/", "/api/models/", "/resolve/", "config.json", ".safetensors"))
    trap = rng.choice((*_TRAPS, *_TRAPS, "silent", "busy"))
    if trap == "busy":
        wait = rng.choice(("300", "3600", "9" * 400, "-5", "0", "Fri, 31 Dec 9999 23:59:59 GMT", "nan", LATIN, "1e9"))
        hub.says(where, raw(rng.choice((429, 503)), Retry_After=wait))
        return f"{where}: busy, Retry-After {wait[:40]!r}", 3.0
    if trap == "silent":
        hub.says(where, rng.choice((silent, trickle)))
        return f"{where}: says nothing, or a byte at a time", 3.0
    return f"{where}: {_TRAPS[trap](rng, hub, other, files, where, scratch) or trap}", None


def _headers(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    values = (LATIN, "a" * 60_000, "", "\x01\x02", "http://[", "http://\xff/", "//", "javascript:x", "bytes 9-1/-3",
              "é" * 200,
              '"' + "\xe9" * 40 + '"', "\x1b]0;ZQtitle\x07", "0" * 5000, "file:///etc/passwd", "gzip",
              "W/\"\"")  # fmt: skip
    headers = {rng.choice(HEADERS).replace("-", "_"): rng.choice(values) for _ in range(rng.randint(1, 3))}
    hub.says(
        given[2], raw(rng.choice((200, 206, 302, 308, 401, 403, 404, 416, 500)), b"{}", **headers), rng.choice((1, 99))
    )
    return f"headers {sorted(headers.items())!r:.200}"


def _status(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    status = rng.choice((100, 101, 199, 201, 204, 304, 400, 401, 402, 403, 404, 410, 416, 418, 451, 501, 599, 600, 999))
    hub.says(given[2], raw(status, rng.choice((b"", b"<html>", b"{}", b"[]", b"null"))))
    return f"status {status}"


def _json(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    told = json.dumps(damaged(listing(rng, given[1]), rng)).encode()
    body = rng.choice(
        (told, told, told, damaged_bytes(told, rng), b"[" * 100_000, b"9" * 100_000, b'{"sha": NaN}', b"\xff")
    )
    hub.says("/api/models/", raw(200, body, Content_Type="application/json"))
    return "a damaged list of files"


def _redirect(rng: random.Random, hub: HostileHub, other: HostileHub, *given: Any) -> str:
    port = other.server.server_address[1]
    place = rng.choice((
        f"{other.url}/blob/x", f"http://localhost:{port}/x", f"//127.0.0.1:{port}/x", f"{hub.url}/again", "/again", "",
        f"http://user:secret@127.0.0.1:{port}/", "http://[", "http://127.0.0.1:99999/", "ftp://127.0.0.1/", "http:///x",
        f"http://127.0.0.1:{port}\\@x/", "https://127.0.0.1:1/", "\xff\xfe", f"HTTP://127.0.0.1:{port}/{LATIN}",
    ))  # fmt: skip
    hub.says(
        rng.choice(("/resolve/", "/api/models/", given[1])), raw(rng.choice((301, 302, 303, 307, 308)), Location=place)
    )
    return f"a redirect to {place!r}"


def _content(rng: random.Random, hub: HostileHub, other: HostileHub, files: dict[str, bytes], *given: Any) -> str:
    name = rng.choice(sorted(files))
    hub.other_content[name] = rng.choice((draws.data(rng)[:100_000], damaged_bytes(files[name], rng), files[name][:-1]))
    return f"other content of {name}"


def _etag(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    hub.etag = rng.choice(
        (LATIN, "../../x", "a" * 5000, "\x01", "0" * 64, "0" * 40, "W/", "é\udcff".encode("utf-8", "replace").decode())
    )
    return f"ETag {hub.etag[:40]!r}"


def _cut(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    how = rng.choice(("", "whole", "shifted", "resized", "short"))
    hub.fail(
        given[2] if given[2] != "/api/models/" else "/resolve/", cut_after=rng.choice((0, 1, 100)), how=how, times=40
    )
    return f"bodies are cut, {how or 'plainly'}"


def _lies(rng: random.Random, hub: HostileHub, *given: Any) -> str:
    told = rng.choice((0, 1, 10**15, -1))
    hub.says(given[2], raw(200, b'{"a": 1}' * rng.choice((1, 1000)), told), 3)
    return f"a body of another length than {told}"


def _says(answer: Answer) -> Callable[..., str]:
    def use(rng: random.Random, hub: HostileHub, other: HostileHub, files: object, where: str, scratch: object) -> str:
        hub.says(where, answer)
        return (answer.__doc__ or "").strip()

    return use


def _cache(rng: random.Random, hub: HostileHub, other: object, files: object, where: str, scratch: Scratch) -> str:
    """Things in the cache where a download would write."""
    folder = scratch.hub / f"models--{REPO.replace('/', '--')}"
    place = rng.choice(("blobs", "refs", "refs/main", "snapshots", f"snapshots/{fake_hub.COMMIT}", ".locks"))
    path = folder / place if rng.random() < 0.8 else folder
    path.parent.mkdir(parents=True, exist_ok=True)
    return f"in the cache, {place} is a {draws.odd_file(rng, path, scratch)}"


def _tokens(rng: random.Random, hub: object, other: object, files: object, where: str, scratch: Scratch) -> str:
    """Files of tokens that are none, or damaged with a token in them; read where HF_TOKEN is not set."""
    path = rng.choice((scratch.token, scratch.token.with_name("stored_tokens")))
    if rng.random() < 0.7:
        return f"{path.name} is a {draws.odd_file(rng, path, scratch)}"
    path.write_text(rng.choice(("", "[me]\n", "[me]\nhf_token = x\n")) + scratch.secrets.token + "\n")
    return f"{path.name} is damaged"


_TRAPS: dict[str, Callable[..., str]] = {
    "headers": _headers, "more headers": _headers, "status": _status, "json": _json, "more json": _json, "etag": _etag,
    "redirect": _redirect, "more redirects": _redirect, "content": _content, "cut": _cut, "lies": _lies,
    "cache": _cache, "tokens": _tokens,
    "echo": _says(echo), "endless": _says(endless), "many headers": _says(many_headers), "packed": _says(packed),
}  # fmt: skip
