"""`localq verify` and `localq prune`, and what `pull`, `ls` and `rm` have to do with them."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path

import pytest

from localq import cli, places
from localq.errors import LocalqError
from localq.files import local_models
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import download
from localq.files.hub import fetch as hub
from localq.files.hub import leftovers as hub_leftovers
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.parts import Part
from localq.files.safetensors_headers import INDEX_NAME
from tests.support.files import cached_models, fake_hub, hub_server
from tests.support.files.hub_server import REPO

FILES = fake_hub.model_files(shards=2)
SECOND = "model-00002-of-00002.safetensors"


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        server.add(REPO, FILES)
        yield server


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code
    said = capsys.readouterr()
    return said.out, said.err


def spoil(path: Path, rng: random.Random) -> None:
    """Flip one bit of the content, in place."""
    with path.resolve().open("r+b") as file:
        file.seek(rng.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def not_closed(error: LocalqError) -> None:
    """Nothing is closed to this user in these tests."""
    raise error


# ---- verify


def test_what_localq_fetched_is_verified_and_repaired_by_pull(server, capsys):
    folder = hub.fetch_repo(REPO)
    out, err = localq(capsys, "verify")
    assert out.splitlines()[1].split()[:3] == [REPO, "right", str(len(FILES))]
    assert err == ""
    spoil(folder / SECOND, random.Random(1))
    out, err = localq(capsys, "verify", REPO, code=8)
    assert "damaged" in out
    assert f"{folder / SECOND} is wrong" in err
    assert f"run `localq pull {REPO}` to repair it" in err
    out, err = localq(capsys, "pull", REPO)
    assert "downloaded and verified" in err
    assert server.fetched().count(SECOND) == 2
    assert len(server.fetched()) == len(FILES) + 1
    localq(capsys, "verify")


def test_a_bit_that_fell_over_by_itself_is_found_and_never_loaded_afterwards(server, capsys):
    """As a disk does it: nothing that is recorded of the file tells."""
    folder = hub.fetch_repo(REPO)
    spoil(folder / SECOND, random.Random(2))
    hub_records.remember(hub_records.users(), REPO, (folder / SECOND).resolve().name, folder / SECOND, ours=True)
    assert hub.fetch_repo(REPO, offline=True) == folder  # it was not touched, as far as one can see
    localq(capsys, "verify", code=8)
    assert hub_server.refused(hub.fetch_repo, REPO, offline=True).exit_code == 8


def test_a_program_that_sets_the_time_back_hides_nothing(server):
    folder = hub.fetch_repo(REPO)
    before = (folder / SECOND).stat()
    spoil(folder / SECOND, random.Random(2))
    os.utime((folder / SECOND).resolve(), ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hub_server.refused(hub.fetch_repo, REPO, offline=True).exit_code == 8


def test_another_tools_file_is_named_and_not_touched(server, capsys):
    folder = cached_models.put(REPO, FILES)
    assert "right" in localq(capsys, "verify")[0]
    spoil(folder / SECOND, random.Random(3))
    content = (folder / SECOND).read_bytes()
    err = localq(capsys, "verify", code=8)[1]
    assert f"run `localq rm {REPO} && localq pull {REPO}` to repair it" in err
    assert "localq rm" in localq(capsys, "pull", REPO, code=8)[1]
    assert (folder / SECOND).read_bytes() == content
    localq(capsys, "rm", "-y", REPO)
    localq(capsys, "pull", REPO)
    localq(capsys, "verify")


def test_verify_json_and_states(server, capsys):
    folder = hub.fetch_repo(REPO)
    made = places.quantized_dir() / "qwen3-8b@nf4"
    made.mkdir(parents=True)
    for name, content in FILES.items():
        (made / name).write_bytes(content)
    embedded = places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    embedded.parent.mkdir(parents=True)
    embedded.write_bytes(b"GGUF, but another one")
    hub_cache.discard(folder / SECOND)
    out, _ = localq(capsys, "verify", "--json", code=8)
    found = {each["name"]: each for each in json.loads(out)["models"]}
    assert {name: (each["right"], each["repair"]) for name, each in found.items()} == {
        REPO: (False, f"localq pull {REPO}"),
        "qwen3-8b@nf4": (True, None),
        "smollm2-135m": (False, "localq pull smollm2-135m"),
    }
    states = {Path(each["path"]).name: each["state"] for each in found[REPO]["files"]}
    assert states == {name: "missing" if name == SECOND else "right" for name in FILES}
    assert {each["state"] for each in found["qwen3-8b@nf4"]["files"]} == {"unrecorded"}
    localq(capsys, "pull", REPO)
    assert localq(capsys, "verify", REPO)[0]


def test_verify_of_nothing(server, capsys):
    assert "localq pull" in localq(capsys, "verify")[1]
    localq(capsys, "verify", "maker/nothing", code=4)


# ---- ls, rm and prune


def cut_off(server, repo: str = REPO, bytes_there: int = 50_000) -> Path:
    """A download that was killed on the way; its part."""
    content = random.Random(4).randbytes(80_000)
    server.add(repo, {"large.gguf": content})
    listing = hub_client.list_files(repo, "main")
    file = listing.files["large.gguf"]
    folder = places.downloads_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with Part(folder / file.content_id, file.content_id, {"repo": repo, "name": file.name, "size": file.size}) as part:
        part.write(content[:bytes_there])
    return part.path


def test_ls_says_what_is_shared_and_what_is_not_finished(server, capsys):
    hub.fetch_repo(REPO)
    cached_models.put("maker/theirs", FILES)
    cut_off(server, "maker/begun")
    found = {each["name"]: each for each in json.loads(localq(capsys, "ls", "--json")[0])["models"]}
    assert {name: (each["shared"], each["complete"]) for name, each in found.items()} == {
        REPO: (False, True), "maker/theirs": (True, True), "maker/begun": (False, False),
    }  # fmt: skip
    assert found["maker/begun"]["bytes"] == 50_000


def test_rm_takes_the_unfinished_part_and_the_record_along(server, capsys):
    part = cut_off(server)
    hub.fetch_repo(REPO)  # goes on with it
    assert not part.exists()
    cut_off(server, "maker/begun")
    body = json.loads(localq(capsys, "rm", "-y", REPO, "maker/begun", "--json")[0])
    assert body["freed_bytes"] == 80_000 + 50_000
    assert [path for path in (places.cache_dir(), places.pulled_dir(), hub_cache.repo_folder(REPO))
            for path in path.rglob("*") if path.is_file()] == []  # fmt: skip


def test_rm_and_prune_leave_what_is_being_fetched(server, capsys):
    part = cut_off(server)
    with download_parts.claim(part.parent, part.stem, lambda: None):
        assert "another localq" in localq(capsys, "rm", "-y", REPO, code=1)[1]
        assert "nothing to remove" in localq(capsys, "prune")[1]
    assert part.exists()


def test_prune_shows_asks_and_frees_what_nobody_uses(server, capsys):
    part = cut_off(server, "maker/begun")
    folder = hub.fetch_repo(REPO)
    theirs = cached_models.put("maker/theirs", FILES)
    unused = [(each / SECOND).resolve() for each in (folder, theirs)]
    for each in (folder, theirs):
        (each / SECOND).unlink()
    out, err = localq(capsys, "prune", "--dry-run", "--json")
    assert {each["path"] for each in json.loads(out)["removed"]} == {str(part), str(unused[0])}
    assert "could be freed" in err
    assert part.exists()
    assert "-y" in localq(capsys, "prune", code=2)[1]
    body = json.loads(localq(capsys, "prune", "-y", "--json")[0])
    assert body["freed_bytes"] == 50_000 + len(FILES[SECOND])
    assert [path.exists() for path in (part, *unused)] == [False, False, True]
    assert "nothing to remove" in localq(capsys, "prune", "-y")[1]


def test_a_download_that_begins_after_it_was_found_is_left(server, capsys):
    part = cut_off(server)
    [found] = hub_leftovers.find(not_closed)
    [model] = local_models.list_local()
    with download_parts.claim(part.parent, part.stem, lambda: None):
        assert hub_leftovers.remove(found) == 0
        assert download_parts.remove(local_models.unfinished_downloads()[model.repo][0]) == 0
        assert part.exists()
        assert part.with_suffix(".state").exists()
        assert part.with_suffix(".lock").exists()
    assert hub_leftovers.remove(found) == 50_000
    assert list(part.parent.iterdir()) == []


def test_the_lock_is_held_until_the_part_is_gone(server, monkeypatch):
    part = cut_off(server)
    [found] = hub_leftovers.find(not_closed)
    unlink, free = Path.unlink, []

    def looked_at(path, missing_ok=False):
        descriptor = os.open(part.with_suffix(".lock"), os.O_RDWR)
        free.append(download_parts._try(descriptor))
        os.close(descriptor)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", looked_at)
    assert hub_leftovers.remove(found) == 50_000
    assert free == [False] * 3


def test_content_that_a_revision_uses_by_now_is_left(server):
    folder = hub.fetch_repo(REPO)
    blob = (folder / SECOND).resolve()
    (folder / SECOND).unlink()
    [found] = hub_leftovers.find(not_closed)
    hub_cache.link(folder / SECOND, blob)
    assert hub_leftovers.remove(found) == 0
    assert (folder / SECOND).is_file()


def test_prune_tells_what_went_and_not_what_stayed(server, capsys, monkeypatch):
    part = cut_off(server)
    [found] = hub_leftovers.find(not_closed)
    monkeypatch.setattr(hub_leftovers, "find", lambda on_unreadable: [found])
    with download_parts.claim(part.parent, part.stem, lambda: None):
        body = json.loads(localq(capsys, "prune", "-y", "--json")[0])
    assert (body["removed"], body["freed_bytes"]) == ([], 0)


def test_files_in_subfolders_use_their_content(server):
    folder = hub.fetch_repo(REPO)
    blob = (folder / SECOND).resolve()
    (folder / SECOND).unlink()
    hub_cache.link(folder / "original" / SECOND, blob)
    assert hub_leftovers.find(not_closed) == []


def test_ls_verify_and_rm_of_a_cache_that_cannot_be_written(server, capsys, monkeypatch):
    part = cut_off(server)
    part.with_suffix(".lock").touch()
    system, writing = os.open, os.O_WRONLY | os.O_RDWR | os.O_CREAT

    def read_only(path, flags, *rest, **options):
        if flags & writing:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return system(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    assert REPO in localq(capsys, "ls")[0]
    assert "incomplete" in localq(capsys, "verify", code=8)[0]
    assert "Read-only" in localq(capsys, "rm", "-y", REPO, code=9)[1]
    assert part.exists()


# ---- flipped bits


def test_1000_flipped_bits_are_all_found_before_a_model_is_loaded(server, capsys):
    """D6: in files that are there, whoever put them there, and on the way."""
    rng, found = random.Random(6), 0
    ours, theirs = hub.fetch_repo(REPO), cached_models.put("maker/theirs", FILES)
    assert hub.fetch_repo("maker/theirs", fake_hub.COMMIT) == theirs
    for number in range(900):
        repo, folder = ((REPO, ours), ("maker/theirs", theirs))[number % 2]
        path = folder / rng.choice(sorted(FILES))
        content = path.read_bytes()
        spoil(path, rng)
        error = hub_server.refused(hub.fetch_repo, repo, fake_hub.COMMIT, offline=True)
        incomplete = path.name == INDEX_NAME and error.exit_code == 6  # it names a shard that there is not
        found += incomplete or (error.exit_code == 8 and path.name in str(error))
        path.resolve().write_bytes(content)
        name = path.resolve().name
        hub_records.remember(hub_records.users(), repo, name, path, ours=repo == REPO)  # as it was, and known to be
    listing = hub_client.list_files(REPO, "main")
    for _ in range(100):
        name = rng.choice(sorted(FILES))
        hub_cache.discard(ours / name)
        flipped = bytearray(FILES[name])
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        server.other_content[name] = bytes(flipped)
        error = hub_server.refused(download.get, listing, listing.files[name])
        found += error.exit_code == 8 and name in str(error) and not (ours / name).exists()
        server.other_content.clear()
        download.get(listing, listing.files[name])
    assert found == 1000
