"""Fetching from the hub: only what is read, pinned and verified, nothing twice, nothing where the network is off."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from localq.errors import ExitCode
from localq.files import catalog
from localq.files.catalog import Target
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.files.hub.remote import to_fetch
from localq.files.safetensors_headers import unread_tensors
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, refused, source

READ = {
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "model.safetensors",
}  # fmt: skip


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        yield server


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


def test_a_shard_of_a_tower_alone_is_not_fetched(server):
    files = fake_hub.model_files(shards=3)
    index = json.loads(files["model.safetensors.index.json"])
    tower, text = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    index["weight_map"] = {
        "model.vision_tower.ln_pre.weight": tower, "multi_modal_projector.linear_1.weight": tower,
        "model.language_model.norm.weight": text, "vision_tower.ln_post.weight": text,
        "language_model.lm_head.weight": "model-00003-of-00003.safetensors",
    }  # fmt: skip
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    server.add(REPO, files)
    folder = hub.fetch(source())
    assert names(folder) == set(files) - {tower}
    assert tower not in server.fetched()
    assert hub_cache.is_complete(folder)
    assert sorted(unread_tensors(folder)) == [
        "model.vision_tower.ln_pre.weight", "multi_modal_projector.linear_1.weight",
    ]  # fmt: skip
    assert {file.name for file in to_fetch(hub_client.list_files(REPO, "main"))} == names(folder)


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
    large = {**fake_hub.model_files(), "model.safetensors": fake_hub.safetensors(1, 3_000_000)}
    server.add(REPO, large, commit="d" * 40)
    hub.fetch(source(), lambda what, done, total: seen.append((what, done, total)), refresh=True)
    assert "model.safetensors, 0 of 3 MB" in [what for what, _, _ in seen]
    assert "model.safetensors, 3 of 3 MB" in [what for what, _, _ in seen]


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
    assert server.fetched().count("model.safetensors") == 2 + 1
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


def test_weights_that_were_written_to_since_are_fetched_anew_and_nothing_else(server):
    server.add(REPO, fake_hub.model_files(shards=2))
    folder = hub.fetch(source())
    server.requests.clear()
    weights = (folder / "model-00002-of-00002.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    error = refused(hub.fetch, source(), offline=True)
    assert error.exit_code == ExitCode.BAD_FILE
    assert "model-00002-of-00002.safetensors" in str(error)
    assert hub.fetch(source()) == folder
    assert server.fetched() == ["model-00002-of-00002.safetensors"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == fake_hub.model_files(shards=2)


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
