"""Sound checkpoints read as safetensors reads them; unsound headers and indexes are refused, quickly and by cause."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.errors import ExitCode, LocalqError
from localq.files.json_files import inside
from localq.files.model_folder import ModelFiles, open_model
from localq.files.safetensors_headers import DTYPE_BYTES, INDEX_NAME, read_header, read_index, shard_paths
from localq.formats.open_checkpoint import open_checkpoint
from localq.formats.tensor_files import DTYPES
from tests.support.files.hostile_headers import (
    DATA,
    HEADERS,
    INDEXES,
    ITEMS,
    LENGTHS,
    OTHER_FILES,
    SHARD,
    SHARD_NAMES,
    index_bytes,
    many_items,
)
from tests.support.files.raw_safetensors import entry, write_raw
from tests.support.models.tiny_checkpoints import make_checkpoint


def files_of(folder: Path) -> ModelFiles:
    return ModelFiles(folder, "safetensors", {"model_type": "llama"})


# ---- sound files


@pytest.mark.parametrize("shard_bytes", [200_000, 10**9], ids=["sharded", "single"])
def test_reads_what_safetensors_reads(tmp_path: Path, shard_bytes: int) -> None:
    folder = make_checkpoint(tmp_path / "m", "qwen2", shard_bytes=shard_bytes)
    shards = sorted(folder.glob("*.safetensors"))
    assert (len(shards) > 2) == (shard_bytes < 10**9)
    expected = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    with open_checkpoint(open_model(folder)) as checkpoint:
        assert checkpoint.tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            read, described = checkpoint.read(name), checkpoint.tensors[name]
            assert torch.equal(read, tensor)
            assert (described.dtype, described.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
            assert described.nbytes == tensor.nbytes
        with pytest.raises(LocalqError, match="nowhere"):
            checkpoint.read("nowhere.weight")


def test_every_dtype(tmp_path: Path) -> None:
    made = {name: torch.zeros(3, dtype=dtype) for name, dtype in DTYPES.items()}
    save_file(made, tmp_path / "model.safetensors")
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES
    with open_checkpoint(files_of(tmp_path)) as checkpoint:
        assert {name: checkpoint.read(name).dtype for name in made} == DTYPES


def test_reading_a_mapped_file_copies_nothing(tmp_path: Path) -> None:
    save_file({"large": torch.zeros(2**24, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with open_checkpoint(files_of(tmp_path), mapped=True) as checkpoint:
        before = _anonymous_bytes()
        tensor = checkpoint.read("large")
        assert tensor.sum() == 0  # every page was touched
        assert _anonymous_bytes() - before < 2**22


def test_a_tensor_that_is_converted_is_never_there_twice(tmp_path: Path) -> None:
    save_file({"large": torch.arange(2**24).bfloat16()}, tmp_path / "model.safetensors")
    with open_checkpoint(files_of(tmp_path)) as checkpoint:
        before = _anonymous_bytes()
        tensor = checkpoint.read_as("large", torch.float32)
        assert _anonymous_bytes() - before < tensor.nbytes + 2**24
        assert torch.equal(tensor, torch.arange(2**24).bfloat16().float())


def _anonymous_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_a_model_that_is_removed_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """As by `localq rm` in another process (reliability D10)."""
    shards = {f"model-0000{i}-of-00003.safetensors": {f"t{i}": torch.full((i, 2 * i), float(i))} for i in (1, 2, 3)}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    owners = {f"t{i}": name for i, name in enumerate(shards, 1)}
    (tmp_path / INDEX_NAME).write_bytes(index_bytes({"weight_map": owners}))
    with open_checkpoint(files_of(tmp_path)) as checkpoint:
        checkpoint.read("t1")
        for path in list(tmp_path.iterdir()):
            path.unlink()
        assert [checkpoint.read(f"t{i}").sum().item() for i in (1, 2, 3)] == [2, 16, 54]


def test_empty_and_scalar_tensors(tmp_path: Path) -> None:
    header = {"a": entry("F32", [], [0, 4]), "b": entry("U8", [0, 7], [4, 4]), "c": entry("U8", [20], [4, 24])}
    read = read_header(write_raw(tmp_path / "x.safetensors", header, DATA))
    assert [(name, part.shape, part.nbytes) for name, part in read.tensors.items()] == [
        ("a", (), 4),
        ("b", (0, 7), 0),
        ("c", (20,), 20),
    ]


# ---- hostile headers (reliability M1)


def _refused(path: Path) -> str:
    start = time.process_time()
    with pytest.raises(LocalqError) as caught:
        read_header(path)
    assert time.process_time() - start < 1.0
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert str(path) in caught.value.what
    assert caught.value.next_step
    return caught.value.why


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers_are_refused(tmp_path: Path, case: str) -> None:
    header, data = HEADERS[case]
    _refused(write_raw(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("case", LENGTHS)
def test_hostile_lengths_are_refused(tmp_path: Path, case: str) -> None:
    _refused(write_raw(tmp_path / "x.safetensors", {"a": entry()}, DATA, length=LENGTHS[case]))


def test_a_header_over_the_cap_is_not_read(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", b"{", length=2**24 + 1)
    os.truncate(path, 2**25)  # sparse: the file is long enough for what its header claims
    assert "allowed" in _refused(path)


@pytest.mark.parametrize("name", OTHER_FILES)
def test_files_that_are_something_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(OTHER_FILES[name])
    _refused(path)


@pytest.mark.parametrize("name", ITEMS)
def test_a_million_things_are_refused_in_time(tmp_path: Path, name: str) -> None:
    assert "too many" in _refused(write_raw(tmp_path / "x.safetensors", many_items(ITEMS[name])))


def test_the_largest_real_headers_pass(tmp_path: Path) -> None:
    header = {f"model.layers.{i // 400}.mlp.experts.{i}.up_proj": entry("U8", [1], [i, i + 1]) for i in range(60_000)}
    path = write_raw(tmp_path / "x.safetensors", header, bytes(60_000))
    assert len(read_header(path).tensors) == 60_000


# ---- hostile indexes (reliability M2)


def with_index(folder: Path, index: Any) -> Path:
    write_raw(folder / SHARD, {"a": entry()}, DATA)
    (folder / INDEX_NAME).write_bytes(index_bytes(index))
    return folder


@pytest.mark.parametrize("shard", SHARD_NAMES, ids=repr)
def test_hostile_shard_names_are_refused(tmp_path: Path, shard: Any) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"must not be opened")
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(LocalqError) as caught:
        open_checkpoint(files_of(with_index(folder, {"weight_map": {"a": shard}})))
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("name", INDEXES)
def test_hostile_indexes_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalqError) as caught:
        open_checkpoint(files_of(with_index(tmp_path, INDEXES[name])))
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_an_index_over_the_cap_is_refused(tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).touch()
    os.truncate(tmp_path / INDEX_NAME, 100 * 2**20)
    with pytest.raises(LocalqError, match="too large"):
        read_index(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_raw(tmp_path / "other.safetensors", {"a": entry()}, DATA)
    write_raw(tmp_path / "third.safetensors", {"b": entry()}, DATA)
    folder = with_index(tmp_path, {"weight_map": {"a": SHARD, "b": "third.safetensors"}})
    with open_checkpoint(files_of(folder)) as checkpoint:
        assert sorted(checkpoint.tensors) == ["a", "b"]  # a shard that the index does not name is not opened
    with_index(tmp_path, {"weight_map": {"a": SHARD, "b": "other.safetensors"}})
    with pytest.raises(LocalqError, match="two shards"):
        open_checkpoint(files_of(folder))


# ---- links and special files


@pytest.mark.parametrize("target", ["../elsewhere.safetensors", f"../{'ab' * 32}", f"../{'0f' * 20}"])
def test_links_of_the_user_lead_out_of_a_folder_and_those_of_a_repository_do_not(tmp_path: Path, target: str) -> None:
    """Weights on another disk, or in a cache that names content by its hash."""
    folder = tmp_path / "m"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / target)
    (folder / "model.safetensors").symlink_to(target)
    with open_checkpoint(files_of(folder)) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0, 1.0]
    (folder / ".git").mkdir()
    with pytest.raises(LocalqError, match=r"link points outside.*or remove \.git") as caught:
        open_checkpoint(files_of(folder))
    assert target in str(caught.value)


def test_a_folder_of_links_into_a_cache_is_read_as_its_files_are(tmp_path: Path) -> None:
    """As older downloads into a folder left it; and links behind links, and a folder on the way that is a link."""
    real, store = tmp_path / "disk", tmp_path / "store"
    real.mkdir()
    store.symlink_to(real)
    folder = tmp_path / "m"
    folder.mkdir()
    contents = {
        "config.json": json.dumps({"model_type": "llama"}),
        "generation_config.json": "{}",
        "chat_template.jinja": "{{ 1 }}",
    }
    for index, (name, content) in enumerate(contents.items()):
        (real / f"{index:040x}").write_text(content)
        (folder / name).symlink_to(store / f"{index:040x}")
    save_file({"a": torch.ones(2)}, real / "w.safetensors")
    (real / "again.safetensors").symlink_to("w.safetensors")
    (folder / "model.safetensors").symlink_to(store / "again.safetensors")
    files = open_model(folder)
    assert (files.config["model_type"], files.chat_template) == ("llama", "{{ 1 }}")
    with open_checkpoint(files) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("target", ["id_rsa", "passwd.txt", "0f.cache", "ab" * 31])
def test_a_link_to_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / target).write_text("{}")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / name).symlink_to(tmp_path / target)
    suffix = re.escape(Path(name).suffix)
    with pytest.raises(
        LocalqError, match=f"the symbolic link points to a file whose name does not end in {suffix} "
    ) as caught:
        inside(folder, name)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert target in str(caught.value)


def test_blobs_of_a_cache_may_lie_on_another_disk(tmp_path: Path) -> None:
    repo, disk = tmp_path / "hub" / "models--org--name", tmp_path / "disk"
    snapshot = repo / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    disk.mkdir()
    (repo / "blobs").symlink_to(disk)
    save_file({"a": torch.ones(2)}, disk / "etag")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    with open_checkpoint(files_of(snapshot)) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0, 1.0]


def test_a_broken_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to("/no/such/disk/w.safetensors")
    with pytest.raises(LocalqError, match=r"the link is broken \(to /no/such/disk/w\.safetensors\)") as caught:
        shard_paths(tmp_path)
    assert "Restore the target of the link" in caught.value.next_step


@pytest.mark.parametrize("target", ["nowhere", "model.safetensors", "/dev/zero"])
def test_links_to_nothing_and_to_devices_are_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "model.safetensors").symlink_to(target)
    with pytest.raises(LocalqError):
        shard_paths(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(LocalqError, match="regular"):
        shard_paths(tmp_path)


def test_the_links_of_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    store = tmp_path / "hub" / "blobs"
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc"
    for folder in (store, blobs, snapshot):
        folder.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, store / "hash")
    (blobs / "etag").symlink_to(store / "hash")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    with open_checkpoint(files_of(snapshot)) as checkpoint:
        assert checkpoint.read("a").tolist() == [1.0, 1.0]
    outside = tmp_path / "secret.safetensors"
    save_file({"a": torch.ones(2)}, outside)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(outside)
    with pytest.raises(LocalqError, match="link points outside"):
        open_checkpoint(files_of(snapshot))
