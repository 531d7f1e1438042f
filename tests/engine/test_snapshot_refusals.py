"""Snapshots that are refused: damaged ones, and those of another model, another machine or another context."""

from __future__ import annotations

import hashlib
import json
import os
import random
from dataclasses import replace

import pytest
import torch

from localq.engine import cache_blocks, snapshot
from localq.engine.load.load import LoadedModel
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.engine.snapshot_files import TOKENS, WEIGHTS, refusal, restored, stored, with_cache
from tests.support.models.tiny_checkpoints import make_checkpoint


def test_what_is_cut_off_is_refused(written):
    path, model = written
    raw = path.read_bytes()
    lengths = [0, 1, 8, 15, 16, 40, len(raw) - 1, len(raw) - 32, len(raw) - 33]
    lengths += random.Random(3).sample(range(len(raw)), 20)
    for length in lengths:
        path.write_bytes(raw[:length])
        assert refusal(path, model).exit_code == ExitCode.BAD_FILE, length
    path.write_bytes(raw + b"\0")
    assert refusal(path, model).exit_code == ExitCode.BAD_FILE


def test_a_flipped_bit_is_refused_and_does_not_enter_the_cache(written):
    path, model = written
    raw, right = path.read_bytes(), stored(model, TOKENS)
    rng = random.Random(5)
    places = [*range(16), *rng.sample(range(16, len(raw)), 60)]
    for place in places:
        damaged = bytearray(raw)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert refusal(path, model).exit_code == ExitCode.BAD_FILE, place
        assert stored(model, TOKENS) == right  # blocks that are right may be there, and are the same bytes


def test_blocks_of_another_place_or_file_are_refused(written, loaded, tmp_path):
    path, model = written
    raw = path.read_bytes()
    start = 48 + int.from_bytes(raw[8:16], "little")
    first, second = raw[start : start + 4128], raw[start + 4128 : start + 8256]
    path.write_bytes(raw[:start] + second + first + raw[start + 8256 :])
    assert "does not match its hash" in str(refusal(path, model))
    snapshot.save(tmp_path / "8.kv", model, WEIGHTS, prompt_of(TOKENS, seed=8))
    other = (tmp_path / "8.kv").read_bytes()
    path.write_bytes(raw[:start] + other[len(other) - len(raw) + start :])
    assert "does not match its hash" in str(refusal(path, model))


def test_what_is_no_snapshot_is_refused(written):
    path, model = written
    path.write_bytes(b"SQLite format 3\0" * 300)
    assert "not a snapshot" in str(refusal(path, model))
    path.unlink()
    assert "cannot be read" in str(refusal(path, model))
    path.mkdir()
    assert refusal(path, model)
    path.rmdir()
    os.mkfifo(path)  # opening one waits for a writer
    assert "not a regular file" in str(refusal(path, model))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": []},
        {"ids": [1, -1]},
        {"ids": [True]},
        {"ids": [10**9]},
        {"ids": "12"},
        {"fingerprint": []},
        {"version": "2"},
    ],
    ids=str,
)
def test_a_header_that_is_sealed_and_senseless_is_refused(written, changes):
    path, model = written
    sealed_with(path, changes)
    assert refusal(path, model)


def sealed_with(path, changes):
    """The file with another header, which its hash matches."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    text = json.dumps(json.loads(raw[16 : 16 + length]) | changes).encode()
    head = raw[:8] + len(text).to_bytes(8, "little") + text
    path.write_bytes(head + hashlib.sha256(head).digest() + raw[48 + length :])


@pytest.mark.parametrize("version", [1, 3])
def test_a_file_of_another_version_of_localq_is_refused_by_its_version(written, version):
    path, model = written
    sealed_with(path, {"version": version})
    assert f"format version is {version}, but this version of localq supports 2" in str(refusal(path, model))


def test_an_engine_whose_snapshot_is_bad_reads_the_prompt_anew(engine, tmp_path, monkeypatch):
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", 4096)
    prompt = prompt_of(70)
    expected = ids_of(engine, prompt, max_tokens=9)
    engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    raw = bytearray((tmp_path / "7.kv").read_bytes())
    raw[-40] ^= 1
    (tmp_path / "7.kv").write_bytes(raw)
    ids_of(engine, prompt_of(30, seed=9), max_tokens=1)
    with pytest.raises(LocalqError, match="snapshot not used"):
        engine.restore_cache(tmp_path / "7.kv", WEIGHTS)
    assert engine.cached_tokens == 0
    assert ids_of(engine, prompt, max_tokens=9) == expected


# ---- what it belongs to


def other_rotary(model: LoadedModel, position: int = TOKENS - 1) -> LoadedModel:
    changed = type(model.model).__new__(type(model.model))
    changed.__dict__.update(model.model.__dict__)
    changed.rotary_tables = [table.clone() for table in model.model.rotary_tables]
    changed.rotary_tables[0][position] += 1
    return replace(model, model=changed)


def other_config(model: LoadedModel) -> LoadedModel:
    changed = type(model.model).__new__(type(model.model))
    changed.__dict__.update(model.model.__dict__)
    changed.config = replace(model.model.config, eps=1e-3)
    return replace(model, model=changed)


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ("in a different weight format", lambda model: replace(model, format="nf4")),
        ("with a different dtype", lambda model: replace(model, dtype=torch.float16)),
        ("with different RoPE tables", other_rotary),
        ("with a different model configuration", other_config),
        ("with a different KV cache precision", lambda model: with_cache(model, torch.float32, 8, 64)),
        ("with a different KV cache precision", lambda model: with_cache(model, torch.float32, "k8v4", 64)),
    ],
)
def test_a_snapshot_of_another_model_is_refused_by_name(written, how, change):
    path, model = written
    assert restored(path, model)
    assert str(refusal(path, change(model))) == f"snapshot not used: the snapshot was saved {how}."


def test_other_weights_kernels_and_devices_are_refused_by_name(written, monkeypatch):
    path, model = written
    assert "with different weights" in str(refusal(path, model, "v" * 64))
    monkeypatch.setattr(snapshot, "NUMERICS", snapshot.NUMERICS + 1)
    assert "with a different version of torch or localq's kernels" in str(refusal(path, model))
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE")
    assert "a different kind of device" in str(refusal(path, model))


OLD_LABELS = {
    "weights": "set of weights",
    "format": "format",
    "dtype": "type",
    "cache_bits": "number of bits in the cache",
    "config": "configuration",
    "rotary": "rotary table",
    "kernels": "version of the kernels",
    "device": "kind of device",
}


def test_files_with_labels_instead_of_keys_are_still_read(written, monkeypatch):
    path, model = written
    keyed = snapshot.fingerprint

    def labelled(*args):
        return {OLD_LABELS[key]: text for key, text in keyed(*args).items()}

    with monkeypatch.context() as patch:
        patch.setattr(snapshot, "fingerprint", labelled)
        snapshot.save(path, model, WEIGHTS, prompt_of(TOKENS))
    raw = path.read_bytes()
    header = json.loads(raw[16 : 16 + int.from_bytes(raw[8:16], "little")])
    assert list(header["fingerprint"]) == list(OLD_LABELS.values())
    assert restored(path, model)
    assert "with different weights" in str(refusal(path, model, "v" * 64))
    assert "with a different KV cache precision" in str(refusal(path, with_cache(model, torch.float32, 8, 64)))


def test_a_context_that_is_too_small_is_named(written, loaded):
    path, _ = written
    small = with_cache(loaded, torch.float32, 16, TOKENS - 1)
    assert f"the snapshot contains {TOKENS} tokens, but the context is only {TOKENS - 1} tokens" in str(
        refusal(path, small)
    )


def test_tables_behind_the_conversation_do_not_count(written):
    path, model = written
    assert restored(path, other_rotary(model, TOKENS))


def test_weights_are_known_by_path_size_and_time(tmp_path):
    folder = make_checkpoint(tmp_path / "a", dtype=torch.float32)
    before = snapshot.weights_id(open_model(folder))
    assert snapshot.weights_id(open_model(folder)) == before
    (folder / "README.md").write_text("not read")
    assert snapshot.weights_id(open_model(folder)) == before
    seen = {before}
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in ("config.json", "model.safetensors.index.json", shards[-1]):
        changed = (folder / name).stat().st_mtime_ns + 1000
        os.utime(folder / name, ns=(changed, changed))
        seen.add(snapshot.weights_id(open_model(folder)))
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    os.utime(folder / "config.json", ns=(changed, changed))
    seen.add(snapshot.weights_id(open_model(folder)))
    folder.rename(tmp_path / "b")
    seen.add(snapshot.weights_id(open_model(tmp_path / "b")))
    assert len(seen) == 6
