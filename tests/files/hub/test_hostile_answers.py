"""Answers that no hub gives: in size, in time, in headers. Each is one LocalqError with exit code 6, within limits."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import tracemalloc
import zlib

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from localq import places
from localq.errors import ExitCode
from localq.files.hub import client as hub_client
from localq.files.hub import connection, download, fetch, layout, parts, pauses
from tests.support.files import fake_hub, hub_server, raw_hub
from tests.support.files.hub_server import REPO, TOKEN, refused, source
from tests.support.files.raw_hub import drip, send

MIB = 2**20
JSON = b"200 OK\r\nContent-Type: application/json"
STATUS = b"HTTP/1.1 200 OK\r\n"
HUGE = b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999999\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
OTHER = "\xe9\xff".encode("latin-1")  # no ASCII, no UTF-8
FILE = b"weights" * 9


@pytest.fixture
def homes(tmp_path, monkeypatch):
    """A user with a token; the hub is the test's."""
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(connection, "HEADERS_S", 1.0)
        monkeypatch.setattr(hub_client, "STALL_S", 0.5)
        monkeypatch.setattr(hub_client, "TIMEOUT_S", 0.5)
        close_session()
        yield server
        close_session()


def answer(head, body, link, path):
    send(link, head, body)


def endless(link, path):
    link.sendall(CHUNKED)
    while True:
        link.sendall(b"100000\r\n" + b" " * MIB + b"\r\n")


def blanks(bits):
    """200 MB of blanks, compressed."""
    deflate = zlib.compressobj(wbits=bits)
    return b"".join([*(deflate.compress(b" " * MIB) for _ in range(200)), deflate.flush()])


def packed(kind):
    if kind in ("gzip", "deflate"):
        return blanks(31 if kind == "gzip" else 15)
    return b"\x1b" if kind == "br" else gzip.compress(gzip.compress(b"{}"))


def compressed(kind):
    return lambda link, path: send(link, JSON + b"\r\nContent-Encoding: " + kind.encode(), packed(kind))


INFO = {
    "without an end": endless,
    "stated as huge": lambda link, path: drip(link, HUGE, b" " * MIB, 0),
    "a length of 5000 digits": lambda link, path: send(link, JSON + b"\r\nContent-Length: " + b"9" * 5000),
    "two lengths": lambda link, path: send(link, JSON + b"\r\nContent-Length: 1\r\nContent-Length: 2", b"{}"),
    "packed by gzip": compressed("gzip"),
    "packed by deflate": compressed("deflate"),
    "packed by br": compressed("br"),
    "packed twice": compressed("gzip, gzip"),
    "packed, but not": lambda link, path: send(link, JSON + b"\r\nContent-Encoding: gzip", b"{}"),
    "packed, cut": lambda link, path: send(link, JSON + b"\r\nContent-Encoding: gzip", gzip.compress(b"{}")[:-4]),
    "not UTF-8": lambda link, path: send(link, JSON, OTHER),
    "deep": lambda link, path: send(link, JSON, b"[" * 100_000),
    "of many objects": lambda link, path: send(link, JSON, b'{"a": [' + b"{}," * 200_000 + b"{}]}"),
    "a number of 10,000 digits": lambda link, path: send(link, JSON, b'{"sha": ' + b"1" * 10_000 + b"}"),
    "sizes beyond a file": lambda link, path: send(
        link, JSON, raw_hub.info(REPO, {"a.txt": b""}).replace(b'"size": 0', b'"size": 1e400')),
    "headers without an end": lambda link, path: drip(link, STATUS, b"A: " + b"b" * 60_000 + b"\r\n", 0),
    "headers that drip": lambda link, path: drip(link, STATUS, b"A: b\r\n"),
    "a line that drips": lambda link, path: drip(link, b"HTTP/1.1 200", b"0"),
    "announcements without an end": lambda link, path: drip(link, b"", b"HTTP/1.1 103 Early Hints\r\n\r\n", 0.01),
    "a body that drips": lambda link, path: drip(link, CHUNKED, b"1\r\n{\r\n"),
    "chunks that drip": lambda link, path: drip(link, CHUNKED, b"1;" + b"x" * 50 + b"\r\n \r\n"),
    "silence": lambda link, path: link.recv(1),
    "no HTTP": lambda link, path: link.sendall(b"220 ready\r\n"),
    "HTTP of another time": lambda link, path: link.sendall(b"HTTP/9.9 200 OK\r\n\r\n{}"),
    "a status that is none": lambda link, path: link.sendall(b"HTTP/1.1 2000 OK\r\n\r\n{}"),
    "a status in Arabic digits": lambda link, path: link.sendall("HTTP/1.1 ٢٠٠ OK\r\n\r\n{}".encode()),
    "nothing": lambda link, path: None,
    "a header that is none": lambda link, path: send(link, b"200 OK\r\nno colon"),
    "other bytes in a header": lambda link, path: send(link, b"200 OK\r\nContent-Encoding: " + OTHER, b"{}"),
    "a gate in other bytes": lambda link, path: send(link, b"418 no\r\nX-Error-Code: " + OTHER),
    "Retry-After in other bytes": lambda link, path: send(link, b"503 no\r\nRetry-After: " + OTHER),
    "Retry-After of the year 99999": lambda link, path: send(
        link, b"503 no\r\nRetry-After: Mon, 01 Jan 99999 00:00:00 GMT"),
    "Retry-After in a far zone": lambda link, path: send(
        link, b"503 no\r\nRetry-After: Mon, 01 Jan 2024 00:00:00 +99999999999999"),
    "Retry-After of 5000 digits": lambda link, path: send(link, b"503 no\r\nRetry-After: " + b"9" * 5000),
}  # fmt: skip
PLACES = {
    "an open bracket": b"http://[",
    "a bracket and a port": b"http://[::1]:port/",
    "a port beyond all": b"http://127.0.0.1:99999999/",
    "a port of 5000 digits": b"http://127.0.0.1:" + b"1" * 5000,
    "other bytes": OTHER,
    "a host in other bytes": b"http://" + OTHER + b"/",
    "a host that is not IDNA": "http://xn--\u0130.example/".encode(),
    "a blank": b"http://a b/",
    "a control character": b"http://127.0.0.1/\x01",
    "nothing": b"",
    "only a scheme": b"http://",
    "another scheme": b"file:///etc/passwd",
    "a script": b"javascript:alert(1)",
    "a name and a password": b"http://me:s3cret-of-theirs@192.0.2.7/",
    "a long one": b"https://127.0.0.1/" + b"a" * 20_000,
    "itself": b"",
}


def moved(place):
    return lambda link, path: send(link, b"302 Found\r\nLocation: " + (place or path.encode()))


CASES = {**INFO, **{f"a redirect to {name}": moved(place) for name, place in PLACES.items()}}


@pytest.mark.parametrize("case", CASES)
def test_an_answer_about_a_repository_is_a_network_error_within_limits(homes, monkeypatch, case):
    with raw_hub.running(CASES[case]) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        tracemalloc.start()
        try:
            error = refused(hub_client.list_files, REPO, "main")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert error.exit_code == ExitCode.NETWORK
    assert peak < 100 * MIB
    assert "s3cret" not in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "case", [*(f"a redirect to {name}" for name in PLACES), *(name for name in INFO if name.startswith("header"))]
)
def test_an_answer_for_a_file_is_a_network_error_too(homes, monkeypatch, case):
    def respond(link, path):
        if path.startswith("/api/"):
            send(link, JSON, raw_hub.info(REPO, dict.fromkeys(fake_hub.model_files(), FILE)))
        else:
            CASES[case](link, path)

    with raw_hub.running(respond) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listing = hub_client.list_files(REPO, "main")
        for call in (
            lambda: hub_client.first_bytes(listing, listing.files["config.json"], 9),
            lambda: fetch.fetch(source()),
        ):
            assert refused(call).exit_code == ExitCode.NETWORK
    assert [path for path in places.downloads_dir().rglob("*.part") if path.stat().st_size] == []


WRONG_RANGES = ("", "Content-Range: bytes 1-9/30", "Content-Range: bytes */30", "Content-Range: items 0-8/30",
                "Content-Range: bytes -1-8/30", "Content-Range: bytes 0-8/*")  # fmt: skip


@pytest.mark.parametrize("stated", WRONG_RANGES)
def test_other_bytes_than_requested_are_refused(homes, monkeypatch, stated):
    """A part of a file that begins elsewhere, or nowhere, is never taken for its beginning."""
    monkeypatch.setattr(pauses, "pause", lambda seconds, why, wait=None: False)
    head = "\r\n".join(filter(None, ("206 Partial Content", stated))).encode()

    def respond(link, path):
        if path.startswith("/api/"):
            send(link, JSON, raw_hub.info(REPO, dict.fromkeys(fake_hub.model_files(), FILE)))
        else:
            send(link, head, FILE[1:10])

    with raw_hub.running(respond) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listing = hub_client.list_files(REPO, "main")
        for call in (
            lambda: hub_client.first_bytes(listing, listing.files["config.json"], 9),
            lambda: download.get(listing, listing.files["config.json"]),
        ):
            error = refused(call)
            assert error.exit_code == ExitCode.NETWORK
            assert "the wrong byte range of config.json" in str(error)


def test_a_small_file_that_drips_ends(homes, monkeypatch):
    def respond(link, path):
        if path.startswith("/api/"):
            send(link, JSON, raw_hub.info(REPO, {"config.json": b"x" * 100_000}))
        else:
            drip(link, b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x")

    with raw_hub.running(respond) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listing = hub_client.list_files(REPO, "main")
        error = refused(hub_client.first_bytes, listing, listing.files["config.json"], 100_000)
    assert error.exit_code == ExitCode.NETWORK
    assert "is responding too slowly" in str(error)  # bytes did arrive


def test_a_download_goes_on_after_an_answer_that_takes_too_long(homes, monkeypatch):
    monkeypatch.setattr(pauses, "pause", lambda seconds, why, wait=None: False)
    asked = []

    def respond(link, path):
        if path.startswith("/api/"):
            send(link, JSON, raw_hub.info(REPO, {"config.json": FILE}))
        elif asked:
            send(link, STATUS.removeprefix(b"HTTP/1.1 ").strip(), FILE)
        else:
            asked.append(path)
            drip(link, b"HTTP/1.1 200 OK\r\nX-Slow: ", b"x")  # headers without an end

    with raw_hub.running(respond) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listing = hub_client.list_files(REPO, "main")
        assert download.get(listing, listing.files["config.json"]).read_bytes() == FILE
    assert asked


def test_an_answer_that_is_packed_is_read(homes, monkeypatch):
    body = raw_hub.info(REPO, {"config.json": b"{}"})
    for kind, content in ((b"gzip", gzip.compress(body)), (b"deflate", zlib.compress(body)), (b"identity", body)):
        with raw_hub.running(functools.partial(answer, JSON + b"\r\nContent-Encoding: " + kind, content)) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            assert set(hub_client.list_files(REPO, "main").files) == {"config.json"}


@pytest.mark.parametrize("over", [0, 1])
def test_the_limit_of_an_answer_is_exact(homes, monkeypatch, over):
    body = raw_hub.info(REPO, {"config.json": b"{}"})
    body += b" " * (hub_client.MAX_INFO_BYTES - len(body) + over)
    for head, content in ((JSON, body), (JSON + b"\r\nContent-Encoding: gzip", gzip.compress(body))):
        with raw_hub.running(functools.partial(answer, head, content)) as hub:
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            if over:
                assert "too large (limit: 16 MiB)" in str(refused(hub_client.list_files, REPO, "main"))
            else:
                assert set(hub_client.list_files(REPO, "main").files) == {"config.json"}


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_small_files_are_small(homes, name):
    files = {**fake_hub.model_files(), name: b"{}"}
    homes.add(REPO, files)
    listing = hub_client.list_files(REPO, "main")
    for size, is_refused in ((layout.MAX_SMALL_BYTES, False), (layout.MAX_SMALL_BYTES + 1, True)):
        listing.files[name] = hub_client.RemoteFile(name, size, "0" * 64)
        if is_refused:
            error = refused(layout.check_layout, listing)
            assert error.exit_code == ExitCode.BAD_FILE
            assert name in str(error)
        else:
            layout.check_layout(listing)


ETAGS = ['"\xe9"', '"a\u0661"', "no-quotes", '"' + "a" * 300 + '"', '"a\x7f"', 'W/"a', "", '"a" "b"', '"\ta"']


@pytest.mark.parametrize("etag", ETAGS)
def test_an_etag_that_is_none_is_in_no_state(homes, monkeypatch, etag):
    monkeypatch.setattr(parts, "STEP_BYTES", 10)
    content = b"c" * 1000

    def respond(link, path):
        if path.startswith("/api/"):
            send(link, JSON, raw_hub.info(REPO, {"config.json": content}))
            return
        value = etag.encode("utf-8" if "\u0661" in etag else "latin-1")
        send(link, b"200 OK\r\nETag: " + value + b"\r\nContent-Length: 1000", content[:500])  # the rest is lost

    with raw_hub.running(respond) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        listing = hub_client.list_files(REPO, "main")
        assert refused(download.get, listing, listing.files["config.json"]).exit_code == ExitCode.NETWORK
        (state,) = places.downloads_dir().rglob("*.state")
        assert json.loads(state.read_bytes().split(b"\n")[0])["etag"] is None
        assert b"If-Range" not in b"".join(hub.requests)


@pytest.mark.parametrize("etag", [*ETAGS, 5, ["a"], {"a": 1}, True])
def test_an_etag_of_a_planted_state_is_not_sent(tmp_path, etag):
    stem, about = tmp_path / ("0" * 64), {"repo": REPO, "name": "config.json", "size": 1000}
    stem.with_name(f"{stem.name}.part").write_bytes(b"c" * 500)
    state = json.dumps({**about, "etag": etag}) + "\n500\n"
    stem.with_name(f"{stem.name}.state").write_text(state)
    with parts.Part(stem, "0" * 64, about) as part:
        assert part.at == 500
        assert part.etag is None


def test_a_token_that_is_none_is_named_without_it(homes, monkeypatch, tmp_path):
    homes.add(REPO, fake_hub.model_files())
    for value in ("schl\u00fcssel-of-mine", "two words-of-mine", "a\x01b-of-mine"):
        monkeypatch.setenv("HF_TOKEN", value)
        error = refused(hub_client.list_files, REPO, "main")
        assert error.exit_code == ExitCode.GATED
        assert "of-mine" not in str(error)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))  # a folder
    assert refused(hub_client.list_files, REPO, "main").exit_code == ExitCode.GATED


def test_pauses_are_counted_down_and_end_with_what_a_report_raises(homes):
    homes.fail("GET /api/models", *[503] * 9, Retry_After="300")
    seen = []

    class Stopped(Exception):
        pass

    @contextlib.contextmanager
    def show(why):
        def report(left_s):
            seen.append(pauses.text(why, left_s))
            if len(seen) == 4:
                raise Stopped

        yield report

    with pauses.shown_by(show), pytest.raises(Stopped):
        hub_client.list_files(REPO, "main")
    assert seen[0] == f"retrying in 300 s: {homes.url} returned HTTP status 503"
    assert seen[-1].startswith("retrying in 298 s")
    assert len(homes.requests) == 1
