"""Conversions straight from a fake hub that tests share: what is made, fetched and on the disk, and kills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from localq.files.hub import download
from localq.files.hub import shards as hub_shards
from localq.files.model_folder import open_model
from localq.quantize import by_layer
from localq.quantize.model import sensitivity
from localq.quantize.output import shards as output_shards
from localq.quantize.request import LayerwiseRequest
from localq.quantize.settings import Effort
from tests.support.files import fake_hub, hub_server
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import REPO
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import windows

SHAPE = {"num_hidden_layers": 5, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
SETTINGS: dict[str, Any] = {"windows": windows(2, 32), "effort": Effort(beam=2, columns=32), "seed": 5}
MIXED: dict[str, Any] = {**SETTINGS, "bits": 15.0}  # with codebooks, which are most of so small a model
MOMENTS = 10


def checkpoint(folder: Path) -> Path:
    """Of six files."""
    return make_checkpoint(folder, "llama", shard_bytes=80_000, **SHAPE)


def made(out: Path, **changes: Any) -> dict[str, str]:
    """Digests of what is made straight from the hub."""
    shards = hub_shards.open_shards(hub_server.source(), cache_of(out))
    assert shards is not None
    try:
        files = open_model(shards.folder, weights=False)
        request = LayerwiseRequest(files, out, device=torch.device("cpu"), shards=shards, **{**SETTINGS, **changes})
        by_layer.convert(request)
    finally:
        shards.close(done=output_shards.load_state(out) is None)  # as the verb does
    return digests(out)


def cache_of(out: Path) -> Path:
    """Where files of the source are."""
    return out.with_name(f"{out.name}.source")


def weights(hub: FakeHub) -> dict[str, int]:
    """Names and sizes."""
    files = hub.repos[REPO].commits[fake_hub.COMMIT]
    return {name: len(content) for name, content in files.items() if name.endswith(".safetensors")}


def whole_fetches(hub: FakeHub) -> list[str]:
    """Files of weights that were fetched, headers left out."""
    asked = [each for each in hub.seen("GET", "/resolve/") if not each.headers.get("range", "").startswith("bytes=0-")]
    return [name for each in asked if (name := each.path.rpartition("/")[2]) in weights(hub)]


def watched(out: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the source that lie beside `out`, whenever a file has come or a layer was read."""
    taken: list[int] = []

    def look(call: Any) -> Any:
        def looked(*arguments: Any, **options: Any) -> Any:
            result = call(*arguments, **options)
            blobs = [path for path in cache_of(out).rglob("blobs/*") if path.is_file()]
            taken.append(sum(size for path in blobs if (size := path.stat().st_size) > 10_000 and not _is_text(path)))
            return result

        return looked

    monkeypatch.setattr(download, "get", look(download.get))
    monkeypatch.setattr(by_layer, "quantize_layer", look(by_layer.quantize_layer))
    for name in ("_forward", "make_ending", "_backward"):
        monkeypatch.setattr(sensitivity, name, look(getattr(sensitivity, name)))
    return taken


def _is_text(path: Path) -> bool:
    return path.read_bytes()[:1] == b"{"


KILLED = """
import gc, json, os, pathlib, random, sys
import torch, huggingface_hub
from tests.support.quantize import vq2_from_hub as tests
from tests.support.quantize.conversions import digests, kill_after
from tests.support.quantize.vq2_conversions import converted
from localq.quantize.output import shards as output_shards
torch.set_num_threads(1)
folder, moments, settings = pathlib.Path(sys.argv[2]), random.Random(12), getattr(tests, sys.argv[4])
converted(pathlib.Path(sys.argv[1]), folder / "first", **settings)
gc.collect()
gc.freeze()  # a child that looks for garbage would copy all that is here

def child(out):
    number = os.fork()
    if number:
        return number
    try:
        tests.made(out, **settings)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def ended(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

_, status, used = os.wait4(child(folder / "whole"), 0)
assert status == 0
whole = used.ru_utime + used.ru_stime
for number in range(int(sys.argv[3])):
    out = folder / str(number)
    running = child(out)
    kill_after(running, whole * moments.random())
    first = ended(running)
    whole_already = (out / "config.json").exists() and output_shards.load_state(out) is None
    second = ended(child(out)) if first else 0  # a model that is whole is not made again: refused
    right = second == (1 if first and whole_already else 0)
    print(json.dumps([first, right, digests(out), tests.cache_of(out).exists()]), flush=True)
"""


def killed_and_gone_on(llama: Path, folder: Path, settings: str, finished: dict[str, str]) -> None:
    """Kills at random moments change nothing; settings: the name of some here."""
    here = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, str(llama), str(folder), str(MOMENTS), settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here)}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
    ended = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(ended) == MOMENTS
    for first, right, found, left in ended:
        assert first in (-9, 0)
        assert (right, found, left) == (True, finished, False)
    assert sum(each[0] == -9 for each in ended) >= MOMENTS // 2
