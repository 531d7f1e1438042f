"""Fetching from the hub: only what is read, pinned and verified; every failure by name; nothing twice."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import fake_hub
import filelock
import pytest

from localq import catalog, hub, hub_cache, hub_client
from localq.catalog import Source, Target
from localq.errors import ExitCode, LocalqError

REPO = "maker/tiny-model"
TOKEN = "hf_a-secret-of-the-user"
ROOT = Path(__file__).parents[1]
READ = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "model.safetensors",
}  # fmt: skip


@pytest.fixture
def server(tmp_path, monkeypatch):
    with fake_hub.FakeHub() as server:
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # the pauses between tries
        yield server


def refused(call, *arguments, **options) -> LocalqError:
    with pytest.raises(LocalqError) as caught:
        call(*arguments, **options)
    assert TOKEN not in str(caught.value)
    return caught.value


def source(**fields) -> Source:
    return Source(format="bf16", repo=REPO, **fields)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- what is fetched


def test_only_files_that_localq_reads_are_fetched_and_the_configuration_last(server):
    junk = {
        "pytorch_model.bin": b"pickle", "modeling_tiny.py": b"import os", "README.md": b"#", "consolidated.safetensors":
        fake_hub.safetensors(9), "original/params.json": b"{}", "metal/model.safetensors": fake_hub.safetensors(8),
        "tokenizer.py": b"code", "training_args.bin": b"pickle", "model.onnx": b"graph",
    }  # fmt: skip
    server.add(REPO, {**junk, **fake_hub.model_files()})
    folder = hub.fetch(source())
    assert names(folder) == READ == set(server.fetched())
    assert server.fetched()[-1] == "config.json"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == fake_hub.model_files()
    assert folder == hub_cache.repo_folder(REPO) / "snapshots" / fake_hub.COMMIT


@pytest.mark.parametrize(
    "name",
    ["../tokenizer.json", "tokenizer/../../../tokenizer.json", "/tmp/tokenizer.json", "tokenizer\x00.json",
     "tokenizer\x1b[2J.json", ".tokenizer.json", "tokenizer" + "r" * 200 + ".json", "a\\tokenizer.json", ""],
)  # fmt: skip
def test_hostile_names_never_become_paths(server, tmp_path, name):
    server.add(REPO, {**fake_hub.model_files(), name: b"evil"})
    folder = hub.fetch(source())
    assert names(folder) == READ
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in written if path.read_bytes() == b"evil"]


def test_shards_are_those_that_the_index_names(server):
    files = fake_hub.model_files(shards=3)
    server.add(REPO, {**files, "model-00009-of-00009.safetensors": fake_hub.safetensors(5)})
    folder = hub.fetch(source())
    assert names(folder) == set(files)
    assert hub_cache.is_complete(folder)


@pytest.mark.parametrize("shard", ["../../evil.safetensors", "model-00002-of-00002.safetensors", "/etc/passwd"])
def test_an_index_that_names_what_is_not_there_is_refused_before_the_weights(server, shard):
    files = fake_hub.model_files(shards=2)
    files.pop("model-00002-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": shard}}
    server.add(REPO, {**files, "model.safetensors.index.json": json.dumps(index).encode()})
    assert refused(hub.fetch, source()).exit_code == ExitCode.BAD_FILE
    assert server.fetched() == ["model.safetensors.index.json"]


def test_a_gguf_source_is_one_file(server):
    files = {"tiny-Q4_0.gguf": b"GGUF four", "tiny-Q8_0.gguf": b"GGUF eight", "config.json": b"{}"}
    server.add(REPO, files)
    path = hub.fetch(source(files=("tiny-Q8_0.gguf",)))
    assert path.read_bytes() == b"GGUF eight"
    assert server.fetched() == ["tiny-Q8_0.gguf"]
    missing = refused(hub.fetch, source(files=("tiny-Q2_K.gguf",)))
    assert missing.exit_code == ExitCode.UNKNOWN_MODEL
    assert "tiny-Q2_K.gguf" in str(missing)


def test_an_unlisted_repository_may_hold_one_gguf_but_not_several(server):
    server.add(REPO, {"tiny.gguf": b"GGUF", "README.md": b"#"})
    assert hub.fetch_repo(REPO).read_bytes() == b"GGUF"
    server.add("maker/many", {"a.gguf": b"1", "b.gguf": b"2"})
    error = refused(hub.fetch_repo, "maker/many")
    assert error.exit_code == ExitCode.USAGE
    assert "a.gguf" in str(error)


@pytest.mark.parametrize(
    ("drop", "add", "said"),
    [
        ("model.safetensors", "pytorch_model.bin", "pickle"),
        ("model.safetensors", "consolidated.safetensors", "consolidated.safetensors"),
        ("model.safetensors", "weights.h5", "neither"),
        ("tokenizer.json", "tokenizer.model", "tokenizer.json"),
        ("config.json", "params.json", "config.json"),
    ],
)
def test_what_could_not_be_loaded_is_refused_before_the_first_byte(server, drop, add, said):
    files = fake_hub.model_files()
    files[add] = files.pop(drop)
    server.add(REPO, files)
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.BAD_FILE
    assert said in str(error)
    assert server.fetched() == []


def test_progress_counts_up_to_the_size_of_all_files(server):
    server.add(REPO, fake_hub.model_files())
    seen: list[tuple[str, int, int]] = []
    hub.fetch(source(), lambda what, done, total: seen.append((what, done, total)))
    total = sum(map(len, fake_hub.model_files().values()))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("config.json", total, total)
    assert "checking model.safetensors" in [what for what, _, _ in seen]


# ---- the cache


def test_a_complete_model_needs_no_request(server):
    server.add(REPO, fake_hub.model_files())
    folder = hub.fetch(source())
    server.requests.clear()
    assert hub.fetch(source()) == folder
    assert hub.fetch(source(), offline=True) == folder
    assert hub.fetch(source(revision=fake_hub.COMMIT)) == folder
    assert hub.fetch_repo(REPO, fake_hub.COMMIT[:9]) == folder
    assert hub.local_path(Target(REPO, "repo", repo=REPO)) == folder
    assert server.requests == []


def test_a_branch_that_moved_is_only_asked_for_on_request(server):
    server.add(REPO, fake_hub.model_files())
    before = hub.fetch_repo(REPO)
    later = "f" * 40
    server.add(REPO, {**fake_hub.model_files(), "tokenizer_config.json": b'{"new": 1}'}, commit=later)
    assert hub.fetch_repo(REPO) == before
    after = hub.fetch_repo(REPO, "main", refresh=True)
    assert after.name == later
    assert hub.fetch_repo(REPO) == after
    assert server.fetched().count("model.safetensors") == 1  # the same content is in the cache already


@pytest.mark.parametrize("damage", ["config.json", "tokenizer.json", "model-00002-of-00002.safetensors", "index"])
def test_an_incomplete_snapshot_is_completed_and_nothing_fetched_twice(server, damage):
    server.add(REPO, fake_hub.model_files(shards=2))
    folder = hub.fetch(source())
    name = "model.safetensors.index.json" if damage == "index" else damage
    hub_cache.discard(folder / name)
    assert hub.local_source(source()) is None
    server.requests.clear()
    assert hub.fetch(source()) == folder
    assert server.fetched() == [name]


def test_parallel_fetches_transfer_each_file_once(server):
    server.add(REPO, fake_hub.model_files(shards=3))
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(hub.fetch(source()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(paths)) == 1
    assert len(paths) == 4
    assert sorted(server.fetched()) == sorted(fake_hub.model_files(shards=3))


@pytest.mark.parametrize("how", ["flag", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_makes_no_connection(server, monkeypatch, how):
    server.add(REPO, fake_hub.model_files())
    if how != "flag":
        monkeypatch.setenv(how, "1")
    error = refused(hub.fetch, source(), offline=how == "flag")
    assert error.exit_code == ExitCode.NETWORK
    assert server.requests == []


# ---- verification


def test_a_flipped_bit_is_found_removed_and_healed_by_the_next_run(server):
    server.add(REPO, fake_hub.model_files())
    content = bytearray(fake_hub.model_files()["model.safetensors"])
    content[333] ^= 4
    server.other_content["model.safetensors"] = bytes(content)
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.BAD_FILE
    assert "model.safetensors" in str(error)
    left = [path for path in hub_cache.repo_folder(REPO).rglob("*") if path.is_file()]
    assert bytes(content) not in [path.read_bytes() for path in left]
    assert hub.local_source(source()) is None
    server.other_content.clear()
    assert hub_cache.is_complete(hub.fetch(source()))
    assert server.fetched().count("model.safetensors") == 2
    assert server.fetched().count("tokenizer.json") == 1


def test_small_files_are_verified_by_their_git_id(server):
    server.add(REPO, fake_hub.model_files())
    server.other_content["tokenizer_config.json"] = b"[]"
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.BAD_FILE
    assert "tokenizer_config.json" in str(error)


def test_the_catalogue_knows_better_than_the_hub(server):
    server.add(REPO, fake_hub.model_files())
    error = refused(hub.fetch, source(sha256={"model.safetensors": "0" * 64}))
    assert error.exit_code == ExitCode.BAD_FILE
    assert "model.safetensors" not in server.fetched()
    right = fake_hub.sha256(fake_hub.model_files()["model.safetensors"])
    assert hub.fetch(source(sha256={"model.safetensors": right}))


def test_weights_placed_by_a_run_that_died_before_it_checked_them_are_checked(server):
    """As after a kill between the transfer and the hash: the file is there, config.json is not."""
    server.add(REPO, fake_hub.model_files())
    folder = hub.fetch(source())
    hub_cache.discard(folder / "config.json")
    weights = (folder / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert refused(hub.fetch, source()).exit_code == ExitCode.BAD_FILE


# ---- refusals and faults


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_gated_model_says_where_its_licence_is(server, monkeypatch, token):
    server.add(REPO, fake_hub.model_files(), gated="manual")
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    for call in (lambda: hub.fetch(source()), lambda: hub.fetch(source(gated=True))):
        error = refused(call)
        assert error.exit_code == ExitCode.GATED
        assert f"{server.url}/{REPO}" in str(error)
        assert "hf auth login" in str(error)
    assert not token or server.seen("HEAD")[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert server.fetched() == []


def test_an_accepted_token_opens_a_gated_model(server, monkeypatch):
    server.add(REPO, fake_hub.model_files(), gated="auto", allowed_tokens=frozenset({TOKEN}))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub_cache.is_complete(hub.fetch(source(gated=True)))


def test_a_wrong_token_is_said_to_be_wrong(server, monkeypatch):
    server.add(REPO, fake_hub.model_files())
    monkeypatch.setenv("HF_TOKEN", "wrong")
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.GATED
    assert "token" in str(error)


@pytest.mark.parametrize("token", ["", TOKEN])
def test_a_missing_repository_or_revision_is_exit_4(server, monkeypatch, token):
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refused(hub.fetch_repo, "maker/nothing").exit_code == ExitCode.UNKNOWN_MODEL
    server.add(REPO, fake_hub.model_files())
    error = refused(hub.fetch_repo, REPO, "v9")
    assert error.exit_code == ExitCode.UNKNOWN_MODEL
    assert "v9" in str(error)


@pytest.mark.parametrize("where", ["GET /api/models", "HEAD /maker/tiny-model/resolve", "GET /maker/tiny-model/res"])
@pytest.mark.parametrize("statuses", [(503, 500), (429, 429)])
def test_passing_faults_are_tried_again(server, where, statuses):
    server.add(REPO, fake_hub.model_files())
    server.fail(where, *statuses, Retry_After="1")
    assert hub_cache.is_complete(hub.fetch(source()))
    assert server.faults == []


@pytest.mark.parametrize("where", ["GET /api/models", "HEAD /maker", "GET /maker/tiny-model/resolve"])
def test_a_hub_that_stays_down_is_a_network_error(server, where):
    server.add(REPO, fake_hub.model_files())
    server.fail(where, *[503] * 40)
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.NETWORK
    assert len(server.requests) <= 12


def test_a_connection_that_breaks_goes_on_where_it_broke(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 16)  # what a break may lose, at most
    server.add(REPO, fake_hub.model_files())
    size = len(fake_hub.model_files()["model.safetensors"])
    server.fail("GET /maker/tiny-model/resolve/" + fake_hub.COMMIT + "/model.safetensors", cut_after=size // 3)
    folder = hub.fetch(source())
    assert (folder / "model.safetensors").stat().st_size == size
    ranges = [each.headers.get("range") for each in server.seen("GET", "model.safetensors")]
    assert ranges == [None, f"bytes={size // 3 // 16 * 16}-"]


def test_nobody_answering_is_a_network_error(server, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.NETWORK
    assert "127.0.0.1:9" in str(error)


@pytest.mark.parametrize("body", [b"<html>log in to the hotel network</html>", b"[]", b'{"id": "x"}', b'{"sha": "x"}'])
def test_something_else_than_a_hub_is_a_network_error(server, monkeypatch, body):
    monkeypatch.setattr(fake_hub._Handler, "_info", lambda self, *given: self._send(200, body, {}))
    assert refused(hub.fetch, source()).exit_code == ExitCode.NETWORK


def test_the_token_stays_with_the_hub(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add(REPO, fake_hub.model_files())
    with fake_hub.FakeHub() as cdn:
        server.cdn = cdn
        assert hub_cache.is_complete(hub.fetch(source()))
        assert [each.path.partition("/")[2][:4] for each in cdn.requests] == ["blob"]
        assert TOKEN not in json.dumps([each.headers for each in cdn.requests])
    assert all(each.headers["authorization"] == f"Bearer {TOKEN}" for each in server.seen("HEAD"))


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(server, monkeypatch):
    server.add(REPO, fake_hub.model_files())
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1234))
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.DISK
    needed = sum(map(len, fake_hub.model_files().values()))
    assert f"{needed:,}" in str(error)
    assert "1,234" in str(error)
    assert server.fetched() == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_fills_up_meanwhile_is_exit_9(server, monkeypatch, number):
    server.add(REPO, fake_hub.model_files())

    def broken(*given, **options):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("huggingface_hub.file_download.http_get", broken)
    assert refused(hub.fetch, source()).exit_code == ExitCode.DISK
    assert hub_cache.incomplete_files(REPO) == []


def test_an_interrupt_leaves_nothing_that_looks_complete(server):
    server.add(REPO, fake_hub.model_files())

    def interrupt(what, done, total):
        if what == "model.safetensors" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hub.fetch(source(), interrupt)
    assert hub_cache.incomplete_files(REPO) == []
    assert hub.local_source(source()) is None
    assert hub_cache.is_complete(hub.fetch(source()))


def test_what_a_killed_download_left_is_removed_and_what_runs_is_spared(server):
    server.add(REPO, fake_hub.model_files())
    blobs = hub_cache.repo_folder(REPO) / "blobs"
    locks = hub_cache.repo_folder(REPO).parent / ".locks" / hub_cache.repo_folder(REPO).name
    for folder in (blobs, locks):
        folder.mkdir(parents=True)
    killed, young, running = (blobs / f"{digit * 64}.0a1b2c3d.incomplete" for digit in "123")
    for path, age_s in ((killed, 3600), (young, 2), (running, 3600)):
        path.write_bytes(b"half of it")
        os.utime(path, (time.time() - age_s,) * 2)
    with filelock.FileLock(locks / f"{'3' * 64}.lock"):
        assert hub_cache.is_complete(hub.fetch(source()))
    assert hub_cache.incomplete_files(REPO) == [young, running]


def test_a_fresh_process_asks_for_nothing_but_the_model_and_prints_nothing(server, tmp_path):
    """Telemetry, warnings and tokens would show here: the client library runs as a user's process has it."""
    server.add(REPO, fake_hub.model_files())
    server.fail("GET /api/models", 503)
    code = f"import time; time.sleep = lambda s: None; from localq import hub; print(hub.fetch_repo({REPO!r}))"
    environment = {**os.environ, "HF_TOKEN": TOKEN, "HF_HOME": str(tmp_path / "home")}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert [each.path for each in server.requests if not each.path.startswith((f"/{REPO}/", "/api/models/"))] == []


# ---- the pieces


def test_local_path_of_everything_a_name_can_mean(server, tmp_path):
    made = tmp_path / "data" / "quantized" / "tiny@nf4"
    target = Target("tiny@nf4", "catalogue", format="nf4")
    made.mkdir(parents=True)
    files = fake_hub.model_files()
    for name in ("model.safetensors", "tokenizer.json"):
        (made / name).write_bytes(files[name])
    assert hub.local_path(target) is None  # config.json comes last there too
    (made / "config.json").write_bytes(files["config.json"])
    assert hub.local_path(target) == made
    assert hub.local_path(Target("x", "folder", path=tmp_path)) == tmp_path
    assert hub.local_path(catalog.resolve("llama-3.1-8b")) is None


def test_pauses_follow_the_server_and_end(monkeypatch):
    slept = []
    monkeypatch.setattr("time.sleep", slept.append)

    class Refused(Exception):
        response = SimpleNamespace(status_code=429, headers={"Retry-After": "100000"})

    def call():
        raise Refused

    assert refused(hub_client._with_retries, call, REPO, "main").exit_code == ExitCode.NETWORK
    assert slept == [hub_client.LONGEST_PAUSE_S] * len(hub_client.PAUSES_S)
