"""A conversation's keys and values in a file: there and back bit for bit."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import pytest
import torch

from localq.engine import cache_blocks, snapshot
from localq.engine.cache import KVCache
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.kv_bits import KV_BITS
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.snapshot_files import TOKENS, WEIGHTS, behind, refusal, restored, stored, with_cache
from tests.support.models.tiny_checkpoints import make_checkpoint

FORMS = [
    (torch.float32, 16), (torch.bfloat16, 16), (torch.float16, 16), (torch.float32, 8), (torch.float32, "k8v4"),
    (torch.float32, 4),
]  # fmt: skip


@pytest.fixture(params=[0, 1, 3], ids=["one block", "a block a run", "ragged blocks"])
def blocks(request, monkeypatch) -> None:
    """Blocks that hold everything, that are smaller than a head, and that end anywhere."""
    size = {0: 2**24, 1: 100, 3: 7001}[request.param]
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", size)


@pytest.mark.parametrize(("dtype", "bits"), FORMS)
@pytest.mark.parametrize("capacity", [TOKENS, 64, 300])
def test_every_form_comes_back_bit_for_bit_into_a_cache_of_any_capacity(
    tmp_path, loaded, dtype, bits, capacity, blocks
):
    ids, path = prompt_of(TOKENS), tmp_path / "sessions" / "7.kv"
    model, other = with_cache(loaded, dtype, bits, 50), with_cache(loaded, dtype, bits, capacity)
    kept = behind(other, TOKENS)
    assert stored(model, TOKENS) != stored(other, TOKENS)
    size = snapshot.save(path, model, WEIGHTS, ids)
    assert restored(path, other) == ids
    assert stored(other, TOKENS) == stored(model, TOKENS)
    assert behind(other, TOKENS) == kept
    assert path.stat().st_size == size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["7.kv"]


@pytest.mark.parametrize("capacity", [40, 300])
def test_latents_come_back_and_the_text_goes_on(tmp_path, capacity, blocks):
    folder = make_checkpoint(tmp_path / "made", "glm4_moe_lite", initializer_range=0.15)
    options = LoadOptions(device="cpu", dtype="float32", ctx=512)
    model, path = load(open_model(folder), options), tmp_path / "7.kv"
    prompt = prompt_of(30)
    engine = Engine(model)
    ids = ids_of(engine, prompt, max_tokens=9)
    engine.save_cache(path, WEIGHTS)
    other = replace(model, cache=KVCache(model.cache.layout, capacity, model.dtype, "cpu"), ctx=capacity)
    resumed = Engine(other)
    assert resumed.restore_cache(path, WEIGHTS) == len(prompt) + 8
    assert all(map(torch.equal, other.cache.parts(len(prompt) + 8), model.cache.parts(len(prompt) + 8)))
    steps = steps_of(resumed, [*prompt, *ids], max_tokens=1)
    assert steps[-1].stats.cached_tokens == len(prompt) + 8
    assert [id for step in steps for id in step.ids] == ids_of(Engine(model), [*prompt, *ids], max_tokens=1)


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "bits"), [
    (torch.float16, 16), (torch.bfloat16, 8), (torch.float16, "k8v4"), (torch.float16, 4),
])  # fmt: skip
def test_a_gpus_cache_comes_back_bit_for_bit(tmp_path, loaded, dtype, bits, blocks):
    on_gpu = replace(loaded, device=torch.device("cuda", 0))
    model, other = (with_cache(on_gpu, dtype, bits, capacity, "cuda") for capacity in (50, 64))
    snapshot.save(tmp_path / "7.kv", model, WEIGHTS, prompt_of(TOKENS))
    kept = behind(other, TOKENS)
    assert restored(tmp_path / "7.kv", other) == prompt_of(TOKENS)
    assert stored(other, TOKENS) == stored(model, TOKENS)
    assert behind(other, TOKENS) == kept
    assert "kind of device" in str(refusal(tmp_path / "7.kv", with_cache(loaded, dtype, bits, 50)))


def test_the_file_is_laid_out_as_it_is_specified(written):
    import hashlib
    import json

    path, model = written
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    header, start = json.loads(raw[16 : 16 + length]), 16 + length + 32
    assert raw[:8] == b"localqKV"
    assert raw[start - 32 : start] == hashlib.sha256(raw[: start - 32]).digest()
    assert header["ids"] == prompt_of(TOKENS)
    layer = model.cache.layer(0)
    assert header["parts"][:2] == [["torch.float32", layer.kv_heads, TOKENS, layer.head_dim]] * 2
    joined, number = b"", 0
    while start < len(raw):
        size = min(4096, len(stored(model, TOKENS)) - len(joined))
        block, digest = raw[start : start + size], raw[start + size : start + size + 32]
        assert digest == hashlib.sha256(raw[16 + length : 48 + length] + number.to_bytes(8, "little") + block).digest()
        joined, number, start = joined + block, number + 1, start + size + 32
    assert number > 3
    assert joined == stored(model, TOKENS)


def test_a_reply_after_a_restore_is_the_reply_that_would_have_come(engine, tmp_path):
    prompt = prompt_of(70)
    follow_up = [*prompt, *ids_of(engine, prompt, max_tokens=9), *prompt_of(11, seed=2)]
    bytes_written = engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    assert bytes_written == (tmp_path / "7.kv").stat().st_size
    expected = ids_of(engine, follow_up, max_tokens=20)
    engine.model.cache.clear()
    later = Engine(engine.model)
    assert later.restore_cache(tmp_path / "7.kv", WEIGHTS) == 70 + 9 - 1
    steps = steps_of(later, follow_up, max_tokens=20)
    assert steps[-1].stats.cached_tokens == 70 + 9 - 1
    assert [id for step in steps for id in step.ids] == expected


@pytest.mark.cuda
@pytest.mark.parametrize("bits", KV_BITS)
def test_a_reply_on_a_gpu_after_a_restore_is_the_reply_that_would_have_come(checkpoint, tmp_path, bits):
    def engine_of(ctx: int) -> Engine:
        options = LoadOptions(device="cuda", dtype="bfloat16", ctx=ctx, kv_bits=bits)
        return Engine(load(open_model(checkpoint), options))

    first, prompt = engine_of(400), prompt_of(70)
    follow_up = [*prompt, *ids_of(first, prompt, max_tokens=9), *prompt_of(11, seed=2)]
    first.save_cache(tmp_path / "7.kv", WEIGHTS)
    expected = ids_of(first, follow_up, max_tokens=20)
    later = engine_of(512)
    ids_of(later, prompt_of(100, seed=4), max_tokens=3)
    free = torch.cuda.mem_get_info()[0]
    assert later.restore_cache(tmp_path / "7.kv", WEIGHTS) == 70 + 9 - 1
    assert torch.cuda.mem_get_info()[0] == free  # the buffer that it goes through is on the host
    steps = steps_of(later, follow_up, max_tokens=20)
    assert steps[-1].stats.cached_tokens == 70 + 9 - 1
    assert [id for step in steps for id in step.ids] == expected


def test_an_empty_cache_is_not_written(engine, tmp_path):
    with pytest.raises(LocalqError, match="the cache is empty"):
        engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    assert not list(tmp_path.iterdir())


def test_a_system_that_pins_no_memory_is_no_hindrance(loaded, tmp_path, monkeypatch):
    """As WSL2 may: the copies are slower then."""
    blocks = cache_blocks.CacheBlocks(loaded.cache.parts(TOKENS))
    monkeypatch.setattr(cache_blocks, "BLOCK", 2**10)
    monkeypatch.setattr(blocks, "_on_cuda", True)
    plain = torch.empty

    def empty(*shape, pin_memory=False, **others):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*shape, **others)

    monkeypatch.setattr(torch, "empty", empty)
    assert blocks._buffers(cache_blocks.WORKERS).shape == (cache_blocks.WORKERS, 2**10)


def test_loading_tells_the_weights_before_they_are_read(checkpoint):
    """What the backend hands to a snapshot is of the files as they were before the load."""
    from localq.worker.backend import TorchBackend
    from localq.worker.messages import Load, RestoreCache, SaveCache

    backend = TorchBackend()
    backend.load(Load(str(checkpoint), LoadOptions(device="cpu", dtype="float32")), lambda *_: None)
    assert backend._weights == snapshot.weights_id(open_model(checkpoint))
    with pytest.raises(LocalqError, match="the cache is empty"):
        backend.save_cache(SaveCache("7.kv"))
    with pytest.raises(LocalqError, match="snapshot not used: the file cannot be read"):
        backend.restore_cache(RestoreCache("missing.kv"))
