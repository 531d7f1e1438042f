"""One file from the hub: goes on where it stopped, takes nothing that is not the rest of it, and gives up by name."""

from __future__ import annotations

import hashlib
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from localq import places
from localq.errors import ExitCode
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import connection, download, pauses
from localq.files.hub import errors as hub_errors
from localq.files.hub import parts as download_parts
from localq.sanitize import Address
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, TOKEN, refused

NAME = "tiny.gguf"
CONTENT = random.Random(7).randbytes(1_000_000)
HASH = hashlib.sha256(CONTENT).hexdigest()
FILE = f"/resolve/{fake_hub.COMMIT}/{NAME}"


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, {NAME: CONTENT})
        yield server


def get(**options) -> Path:
    listing = hub_client.list_files(REPO, "main")
    return download.get(listing, listing.files[NAME], **options)


def left_over() -> list[str]:
    """What is in the folders of downloads and of the cache besides the file itself."""
    folders = (places.downloads_dir(), hub_cache.repo_folder(REPO))
    return [path.name for folder in folders for path in folder.rglob("*")
            if path.name not in (NAME, HASH, fake_hub.COMMIT, "blobs", "snapshots")]  # fmt: skip


def ranges(server) -> list[str | None]:
    return [each.headers.get("range") for each in server.seen("GET", FILE)]


def test_a_file_is_where_other_tools_look_for_it_and_nothing_else_is(server):
    path = get()
    assert path == hub_cache.repo_folder(REPO) / "snapshots" / fake_hub.COMMIT / NAME
    assert path.readlink() == Path("../../blobs") / HASH
    assert path.read_bytes() == CONTENT
    assert left_over() == []
    import huggingface_hub

    found = huggingface_hub.try_to_load_from_cache(REPO, NAME, cache_dir=places.hub_cache(), revision=fake_hub.COMMIT)
    assert found == str(path)
    scanned = huggingface_hub.scan_cache_dir(places.hub_cache())
    assert (scanned.warnings, scanned.size_on_disk) == ([], len(CONTENT))


def test_an_empty_file_is_a_file(server):
    server.add(REPO, {NAME: b""})
    assert get().read_bytes() == b""


# ---- broken connections (D1, D3)


def test_a_connection_that_breaks_goes_on_where_it_broke(server):
    server.fail(FILE, cut_after=333_333)
    server.fail(FILE, cut_after=222_222)
    assert get().read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=333333-", "bytes=555555-"]
    assert [each.headers.get("if-range") for each in server.seen("GET", FILE)] == [None, f'"{HASH}"', f'"{HASH}"']
    assert server.sent_of(NAME) == len(CONTENT)


def test_a_server_that_falls_silent_is_left_after_the_stall_time(server, monkeypatch):
    assert hub_client.STALL_S == 30
    monkeypatch.setattr(hub_client, "STALL_S", 0.2)
    server.fail(FILE, cut_after=400_000, how="stall")
    assert get().read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=400000-"]


def test_a_body_without_a_length_that_ends_early_goes_on(server):
    server.fail(FILE, cut_after=250_000, how="short")
    assert get().read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=250000-"]


def test_the_next_process_goes_on_from_the_last_durable_step(server, monkeypatch):
    """As after a kill: what the state does not count is fetched again, even if it is there."""
    monkeypatch.setattr(download_parts, "STEP_BYTES", 100_000)
    server.fail(FILE, cut_after=512_345)
    server.fail(FILE, 403)
    refused(get)
    part, state = (places.downloads_dir() / f"{HASH}{suffix}" for suffix in (".part", ".state"))
    assert part.read_bytes() == CONTENT[:512_345]  # left in peace: all of it is durable
    lines = state.read_text().splitlines()
    assert int(lines[-1]) == 512_345
    state.write_text("\n".join(lines[:3]) + "\n1234")  # cut off within a line
    part.write_bytes(CONTENT[:400_000] + bytes(50_000))
    assert get().read_bytes() == CONTENT
    assert ranges(server)[-1] == f"bytes={lines[2]}-"
    assert left_over() == []


@pytest.mark.parametrize("damage", ["", "no JSON\n100000\n", "{}\n100000\n", '{"etag": 1}\n', "[]\n5\n"])
def test_a_damaged_state_begins_anew(server, damage):
    folder = places.downloads_dir()
    folder.mkdir(parents=True)
    (folder / f"{HASH}.part").write_bytes(CONTENT[:150_000])
    (folder / f"{HASH}.state").write_text(damage)
    assert get().read_bytes() == CONTENT
    assert ranges(server) == [None]


def test_a_part_that_the_disk_spoiled_is_fetched_again(server):
    folder = places.downloads_dir()
    folder.mkdir(parents=True)
    (folder / f"{HASH}.part").write_bytes(CONTENT[:100_000] + bytes(100_000))
    (folder / f"{HASH}.state").write_text(f'{{"etag": "\\"{HASH}\\""}}\n200000\n')
    assert get().read_bytes() == CONTENT
    assert ranges(server) == ["bytes=200000-", None]


def test_a_link_in_place_of_a_part_is_not_followed(server, tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("years")
    places.downloads_dir().mkdir(parents=True)
    (places.downloads_dir() / f"{HASH}.part").symlink_to(mine)
    assert get().read_bytes() == CONTENT
    assert mine.read_text() == "years"


# ---- answers that are not the rest of the file (D4)


@pytest.mark.parametrize("how", ["whole", "shifted", "resized"])
def test_an_answer_to_another_question_is_never_appended(server, how):
    server.fail(FILE, cut_after=600_000)
    server.fail(FILE, how=how)
    assert get().read_bytes() == CONTENT
    assert ranges(server)[:2] == [None, "bytes=600000-"]
    assert left_over() == []


def test_a_range_that_the_server_does_not_have_begins_anew(server):
    server.fail(FILE, cut_after=600_000)
    server.fail(FILE, 416)
    assert get().read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=600000-", None]


def test_a_server_that_never_ends_a_file_is_left_by_name(server):
    server.fail(FILE, how="whole", cut_after=600_000, times=40)
    error = refused(get)
    assert error.exit_code == ExitCode.NETWORK
    assert len(server.seen("GET", FILE)) == download.TRIES


def test_as_many_tries_as_it_takes_while_more_comes_in(server):
    server.fail(FILE, cut_after=100_000, times=9)
    assert get().read_bytes() == CONTENT
    assert len(server.seen("GET", FILE)) == 10


# ---- content that is not the recorded one (D5, D6, D7)


@pytest.mark.parametrize("wrong", ["flipped", "longer", "shorter", "zeros"])
@pytest.mark.parametrize("heals", [True, False])
def test_other_content_is_dropped_tried_once_more_and_then_named(server, monkeypatch, wrong, heals):
    other = {
        "flipped": CONTENT[:77_777] + bytes([CONTENT[77_777] ^ 32]) + CONTENT[77_778:],
        "longer": CONTENT + b"more", "shorter": CONTENT[:-5], "zeros": CONTENT[:500_000] + bytes(500_000),
    }  # fmt: skip
    server.other_content[NAME] = other[wrong]
    if heals:
        restart = download.Part.restart
        monkeypatch.setattr(download.Part, "restart", lambda part: (server.other_content.clear(), restart(part)))
        assert get().read_bytes() == CONTENT
    else:
        error = refused(get)
        assert error.exit_code == ExitCode.BAD_FILE
        assert NAME in str(error)
        assert not hub_cache.repo_folder(REPO).exists()
        assert [name for name in left_over() if not name.endswith(".lock")] == []
    assert len(server.seen("GET", FILE)) == 2


def test_content_that_changes_on_the_way_is_not_mixed(server):
    """If-Range: the server has another etag now, so it sends all of what it has."""
    server.fail(FILE, cut_after=600_000)
    other = random.Random(8).randbytes(len(CONTENT))
    serve = server.note

    def swap(request):
        fault = serve(request)
        if request.headers.get("range"):
            server.other_content[NAME], server.etag = other, "newer"
        return fault

    server.note = swap
    error = refused(get)
    assert error.exit_code == ExitCode.BAD_FILE
    assert ranges(server) == [None, "bytes=600000-", None]


# ---- refusals and pauses (D11, D14)


def test_pauses_are_the_servers_or_grow(server, monkeypatch):
    slept = []
    monkeypatch.setattr(pauses, "pause", lambda seconds, why: slept.append(seconds))
    server.fail(FILE, 503, 503)
    server.fail(FILE, 429, Retry_After="17")
    assert get().read_bytes() == CONTENT
    assert slept == [hub_errors.PAUSES_S[0], hub_errors.PAUSES_S[1], 17.0]


@pytest.mark.parametrize(("status", "code"), [(401, 5), (403, 5), (404, 4), (400, 6), (503, 6)])
def test_refusals_have_a_cause(server, status, code):
    server.fail(FILE, *[status] * 9)
    assert refused(get).exit_code == code
    assert len(server.seen("GET", FILE)) == (download.TRIES if status == 503 else 1)


def test_a_pause_may_be_a_date(monkeypatch):
    response = SimpleNamespace(status_code=503, headers={})
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    for asked, pause_s in (("Sun, 09 Sep 2001 01:47:10 GMT", 30.0), ("Sun, 09 Sep 2001 01:46:00 GMT", 0.0), ("x", 4.0),
                           ("\xb2", 4.0), ("9" * 400, hub_errors.LONGEST_PAUSE_S)):  # fmt: skip
        response.headers["Retry-After"] = asked
        assert hub_errors.pause_after_s(hub_errors.RefusedError(response), 4.0) == pause_s


def test_a_length_that_is_no_number_is_none(tmp_path):
    file = hub_client.RemoteFile(NAME, 9, HASH, None)
    with download_parts.Part(tmp_path / HASH, HASH, {"size": 9}) as part:
        transfer = download._Transfer(SimpleNamespace(repo=REPO), file, part, download._ignore)
        assert transfer._goes_on(SimpleNamespace(status_code=200, headers={"content-length": "\xb2"}))


@pytest.mark.parametrize("body", [b"[]", b'{"error": 7}', b"\xff" * 100, b"[" * 100_000])
def test_what_a_refusal_says_besides_its_status_is_not_read(server, monkeypatch, body):
    monkeypatch.setattr(fake_hub._Handler, "_resolve", lambda self, *given: self._send(403, body, {}))
    assert refused(get).exit_code == ExitCode.GATED


# ---- redirects (D12)


def test_the_token_goes_to_the_hub_and_the_file_comes_from_the_other_host(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub.FakeHub() as cdn:
        server.cdn = cdn
        cdn.fail("GET /blob", cut_after=300_000)
        assert get().read_bytes() == CONTENT
        assert [each.headers.get("range") for each in cdn.requests] == [None, "bytes=300000-"]
        assert [each for each in cdn.requests if "authorization" in each.headers or TOKEN in str(each.headers)] == []
    assert {each.headers["authorization"] for each in server.seen("GET", FILE)} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize(
    "location", ["http://192.0.2.7/signed?key=s3cret", "//192.0.2.7/x", "ftp://127.0.0.1/x", "file:///etc/passwd", ""]
)
def test_nobody_is_followed_out_of_encryption(server, location):
    server.fail(FILE, 302, Location=location)
    error = refused(get)
    assert error.exit_code == ExitCode.NETWORK
    assert "not encrypted" in str(error)
    assert "s3cret" not in str(error)
    assert len(server.seen("GET", FILE)) == 1


@pytest.mark.parametrize(
    ("location", "said"),
    [("http://192.0.2.7/signed?key=s3cret", "not encrypted"), ("//192.0.2.7/x", "not encrypted"),
     ("ftp://127.0.0.1/x", "not encrypted"), ("/api/models/a/b", "does not exist or is private")],
)  # fmt: skip
def test_nor_for_metadata(server, monkeypatch, location, said):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.fail("/api/models/", 302, Location=location)
    error = refused(hub_client.list_files, REPO, "main")
    assert error.exit_code == (ExitCode.NETWORK if "private" not in said else ExitCode.UNKNOWN_MODEL)
    assert said in str(error)
    assert "s3cret" not in str(error)
    assert len(server.seen("GET", "/api/")) == 1 + (said == "does not exist or is private")


def test_the_token_does_not_follow_metadata_to_another_host(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with fake_hub.FakeHub() as other:
        other.add(REPO, {"config.json": b"{}"})
        server.fail("/api/models/", 307, Location=f"{other.url}/api/models/{REPO}?blobs=true")
        assert set(hub_client.list_files(REPO, "main").files) == {"config.json"}
        assert other.requests
        assert [each for each in other.requests if TOKEN in str(each.headers)] == []


def test_a_hub_with_https_stays_on_https(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example")
    begin = Address("https://hub.example/a/b/resolve/main/c")
    for location, whole in (("https://cdn.example/c", "https://cdn.example/c"), ("/d", "https://hub.example/d")):
        assert connection.next_address("a/b", begin, location).reveal() == whole
    for plain in ("http://hub.example/c", "http://cdn.example/c"):
        error = refused(connection.next_address, "a/b", begin, plain)
        assert error.exit_code == ExitCode.NETWORK
        assert "not encrypted" in str(error)


def test_redirects_without_an_end_end(server):
    server.fail(FILE, *[302] * 40, Location=FILE)
    assert refused(get).exit_code == ExitCode.NETWORK
    assert len(server.requests) < 20


def test_what_a_fetch_takes_is_counted_while_another_one_finishes(server):
    listing = hub_client.list_files(REPO, "main")
    blob, part = hub_cache.repo_folder(REPO) / "blobs" / HASH, places.downloads_dir() / f"{HASH}.part"
    for folder in (blob.parent, part.parent):
        folder.mkdir(parents=True, exist_ok=True)
    part.write_bytes(CONTENT[:400_000])
    done = threading.Event()

    def finish_and_begin_again() -> None:
        while not done.is_set():
            part.replace(blob)
            blob.replace(part)

    other = threading.Thread(target=finish_and_begin_again)
    other.start()
    try:
        found = {download.missing_bytes(listing, [listing.files[NAME]]) for _ in range(5000)}
    finally:
        done.set()
        other.join()
    assert found <= {0, 600_000, len(CONTENT)}  # all of it where it began again between the two looks
    assert download.missing_bytes(listing, [listing.files[NAME]]) == 600_000
