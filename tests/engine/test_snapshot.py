"""A conversation's keys and values in a file: there and back bit for bit, and nothing of what is damaged or foreign."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_runs import ids_of, prompt_of, steps_of
from tiny_checkpoints import make_checkpoint

from localq.engine import cache_blocks, snapshot
from localq.engine.cache import KVCache, stored_parts
from localq.engine.generate import Engine
from localq.engine.load import LoadedModel, Options, load
from localq.errors import ExitCode, LocalqError
from localq.modelfiles import open_model

WEIGHTS = "w" * 64
TOKENS = 41
FORMS = [(torch.float32, 16), (torch.bfloat16, 16), (torch.float16, 16), (torch.float32, 8), (torch.float32, 4)]


def with_cache(loaded: LoadedModel, dtype: torch.dtype, bits: int, capacity: int, device: str = "cpu") -> LoadedModel:
    """`loaded` with a cache of another form, every byte of it random."""
    cache = KVCache(loaded.model.kv_layout(), capacity, dtype, device, bits)
    generator = torch.Generator().manual_seed(capacity)
    for layer in cache.layers:
        for part in stored_parts(layer):
            count = part.numel() * part.element_size()
            part.view(torch.uint8).copy_(
                torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(part.view(torch.uint8).shape)
            )
    return replace(loaded, cache=cache, ctx=capacity, dtype=dtype, kv_bits=bits)


def stored(model: LoadedModel, positions: int) -> bytes:
    """What the first slots hold, byte for byte."""
    parts = [part[:, :positions].contiguous() for layer in model.cache.layers for part in stored_parts(layer)]
    return b"".join(part.view(torch.uint8).cpu().numpy().tobytes() for part in parts)


def behind(model: LoadedModel, positions: int) -> bytes:
    """What the others hold."""
    parts = [part[:, positions:].contiguous() for layer in model.cache.layers for part in stored_parts(layer)]
    return b"".join(part.view(torch.uint8).cpu().numpy().tobytes() for part in parts)


def restored(path: Path, model: LoadedModel, weights: str = WEIGHTS) -> list[int]:
    with snapshot.Snapshot(path, model, weights) as found:
        found.restore()
        return found.ids


@pytest.fixture(params=[0, 1, 3], ids=["one block", "a block a run", "ragged blocks"])
def blocks(request, monkeypatch) -> None:
    """Blocks that hold everything, that are smaller than a head, and that end anywhere."""
    size = {0: 2**24, 1: 100, 3: 7001}[request.param]
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", size)


@pytest.fixture
def written(tmp_path, loaded, monkeypatch) -> tuple[Path, LoadedModel]:
    """A file of several blocks, and the model that it is of."""
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", 4096)
    model, path = with_cache(loaded, torch.float32, 16, 64), tmp_path / "7.kv"
    snapshot.save(path, model, WEIGHTS, prompt_of(TOKENS))
    return path, model


def refusal(path: Path, model: LoadedModel, weights: str = WEIGHTS) -> LocalqError:
    with pytest.raises(LocalqError, match=r"^snapshot not used: ") as caught:
        restored(path, model, weights)
    return caught.value


# ---- there and back


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


@pytest.mark.cuda
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float16, 16), (torch.bfloat16, 8), (torch.float16, 4)])
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
    layer = model.cache.layers[0]
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
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_reply_on_a_gpu_after_a_restore_is_the_reply_that_would_have_come(checkpoint, tmp_path, bits):
    def engine_of(ctx: int) -> Engine:
        options = Options(device="cuda", dtype="bfloat16", ctx=ctx, kv_bits=bits)
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
    with pytest.raises(LocalqError, match="nothing is cached"):
        engine.save_cache(tmp_path / "7.kv", WEIGHTS)
    assert not list(tmp_path.iterdir())


# ---- damage


def test_a_system_that_pins_no_memory_is_no_hindrance(loaded, tmp_path, monkeypatch):
    """As WSL2 may: the copies are slower then."""
    blocks = cache_blocks.CacheBlocks(loaded.cache, TOKENS)
    monkeypatch.setattr(cache_blocks, "BLOCK", 2**10)
    monkeypatch.setattr(blocks, "_on_cuda", True)
    plain = torch.empty

    def empty(*shape, pin_memory=False, **others):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*shape, **others)

    monkeypatch.setattr(torch, "empty", empty)
    assert blocks._buffers(cache_blocks.WORKERS).shape == (cache_blocks.WORKERS, 2**10)


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
    assert "changed" in str(refusal(path, model))
    snapshot.save(tmp_path / "8.kv", model, WEIGHTS, prompt_of(TOKENS, seed=8))
    other = (tmp_path / "8.kv").read_bytes()
    path.write_bytes(raw[:start] + other[len(other) - len(raw) + start :])
    assert "changed" in str(refusal(path, model))


def test_what_is_no_snapshot_is_refused(written):
    path, model = written
    path.write_bytes(b"SQLite format 3\0" * 300)
    assert "no snapshot" in str(refusal(path, model))
    path.unlink()
    assert "cannot be read" in str(refusal(path, model))
    path.mkdir()
    assert refusal(path, model)
    path.rmdir()
    os.mkfifo(path)  # opening one waits for a writer
    assert "not a file" in str(refusal(path, model))


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": []},
        {"ids": [1, -1]},
        {"ids": [True]},
        {"ids": [10**9]},
        {"ids": "12"},
        {"fingerprint": []},
        {"version": 2},
    ],
    ids=str,
)
def test_a_header_that_is_sealed_and_senseless_is_refused(written, changes):
    import hashlib
    import json

    path, model = written
    raw = path.read_bytes()
    length = int.from_bytes(raw[8:16], "little")
    text = json.dumps(json.loads(raw[16 : 16 + length]) | changes).encode()
    head = raw[:8] + len(text).to_bytes(8, "little") + text
    path.write_bytes(head + hashlib.sha256(head).digest() + raw[48 + length :])
    assert refusal(path, model)


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
    ("name", "change"),
    [
        ("format", lambda model: replace(model, format="nf4")),
        ("type", lambda model: replace(model, dtype=torch.float16)),
        ("rotary table", other_rotary),
        ("configuration", other_config),
        ("number of bits in the cache", lambda model: with_cache(model, torch.float32, 8, 64)),
    ],
)
def test_a_snapshot_of_another_model_is_refused_by_name(written, name, change):
    path, model = written
    assert restored(path, model)
    assert str(refusal(path, change(model))) == f"snapshot not used: it was made with another {name}."


def test_other_weights_kernels_and_devices_are_refused_by_name(written, monkeypatch):
    path, model = written
    assert "another set of weights" in str(refusal(path, model, "v" * 64))
    monkeypatch.setattr(snapshot, "NUMERICS", snapshot.NUMERICS + 1)
    assert "another version of the kernels" in str(refusal(path, model))
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SSE")
    assert "another kind of device" in str(refusal(path, model))


def test_a_context_that_is_too_small_is_named(written, loaded):
    path, _ = written
    small = with_cache(loaded, torch.float32, 16, TOKENS - 1)
    assert f"it holds {TOKENS} tokens, the context {TOKENS - 1}" in str(refusal(path, small))


def test_tables_behind_the_conversation_do_not_count(written):
    path, model = written
    assert restored(path, other_rotary(model, TOKENS))


def test_weights_are_known_by_path_size_and_time(tmp_path):
    folder = make_checkpoint(tmp_path / "a", dtype=torch.float32)
    before = snapshot.weights_of(open_model(folder))
    assert snapshot.weights_of(open_model(folder)) == before
    (folder / "README.md").write_text("not read")
    assert snapshot.weights_of(open_model(folder)) == before
    seen = {before}
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    for name in ("config.json", "model.safetensors.index.json", shards[-1]):
        changed = (folder / name).stat().st_mtime_ns + 1000
        os.utime(folder / name, ns=(changed, changed))
        seen.add(snapshot.weights_of(open_model(folder)))
    with (folder / "config.json").open("a") as file:
        file.write(" ")
    os.utime(folder / "config.json", ns=(changed, changed))
    seen.add(snapshot.weights_of(open_model(folder)))
    folder.rename(tmp_path / "b")
    seen.add(snapshot.weights_of(open_model(tmp_path / "b")))
    assert len(seen) == 6


# ---- writers that die, and two at a time

WRITER = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from localq.engine import cache_blocks, snapshot
    from localq.engine.generate import Engine
    from localq.engine.load import Options, load
    from localq.modelfiles import open_model
    snapshot.BLOCK = cache_blocks.BLOCK = 4096
    torch.set_num_threads(1)
    engine = Engine(load(open_model(Path(sys.argv[1])), Options(device="cpu")))

    def die_at(name, left):
        call = getattr(os, name)
        def dying(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        setattr(os, name, dying)

    for point in sys.argv[3:]:
        folder = Path(sys.argv[2]) / point
        engine._cached = list(range(1, 31))
        engine.save_cache(folder / "7.kv", "w" * 64)
        child = os.fork()
        if child == 0:
            die_at(point.split()[0], int(point.split()[1]))
            engine._cached = list(range(1, 200))
            engine.save_cache(folder / "7.kv", "w" * 64)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_writer_that_is_killed_leaves_the_file_that_was_there(checkpoint, loaded, tmp_path, monkeypatch):
    points = ["pwrite 0", "pwrite 1", "pwrite 9", "fsync 0", "replace 0"]
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(checkpoint), str(tmp_path), *points]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.split() == [str(int(signal.SIGKILL))] * len(points), run.stderr
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", 4096)
    for point in points:
        engine = Engine(loaded)
        assert engine.restore_cache(tmp_path / point / "7.kv", WEIGHTS) == 30
        assert len(list((tmp_path / point).glob("7.kv.*.part"))) == 1  # which the front end sweeps away


def test_a_full_disk_leaves_the_file_that_was_there(written, monkeypatch):
    path, model = written
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LocalqError, match="the disk is full") as caught:
        snapshot.save(path, model, WEIGHTS, prompt_of(TOKENS, seed=3))
    assert caught.value.exit_code == ExitCode.DISK
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["7.kv"]


def test_two_writers_and_a_reader_see_whole_files(written, loaded):
    path, _ = written
    conversations = [prompt_of(20 + i, seed=i) for i in range(2)]
    models = [with_cache(loaded, torch.float32, 16, 64 + i) for i in range(2)]
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(15):
                snapshot.save(path, models[number], WEIGHTS, conversations[number])
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    reader = with_cache(loaded, torch.float32, 16, 99)
    seen = 0
    while any(writer.is_alive() for writer in writers) or not seen:
        ids = restored(path, reader)
        if ids in conversations:
            seen += 1
            assert stored(reader, len(ids)) == stored(models[conversations.index(ids)], len(ids))
    for writer in writers:
        writer.join()
    assert not errors
    assert os.listdir(path.parent) == ["7.kv"]


def test_loading_tells_the_weights_before_they_are_read(checkpoint):
    """What the backend hands to a snapshot is of the files as they were before the load."""
    from localq.worker.backend import TorchBackend
    from localq.worker.messages import Load, RestoreCache, SaveCache

    backend = TorchBackend()
    backend.load(Load(str(checkpoint), device="cpu"), lambda *_: None)
    assert backend._weights == snapshot.weights_of(open_model(checkpoint))
    with pytest.raises(LocalqError, match="nothing is cached"):
        backend.save_cache(SaveCache("7.kv"))
    with pytest.raises(LocalqError, match="snapshot not used: it cannot be read"):
        backend.restore_cache(RestoreCache("missing.kv"))
