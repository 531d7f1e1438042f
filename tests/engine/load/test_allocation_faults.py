"""Memory that runs out while a model is loaded (reliability G2): at the nth allocation, for every n.

On the CPU, where an allocation is an operation of torch that makes a storage; `test_memory_on_cuda` has a GPU's.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from localq.engine.generate import Engine
from localq.engine.load import load as engine_load
from localq.engine.load.load import LoadedModel
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.formats.checkpoint import Checkpoint
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from tests.support.files.hostile_models import FORMATS, write_sound

CPU = LoadOptions(device="cpu", dtype="float32", ctx=64)
INJECTIONS = 50  # in each of the quantized formats; in the plain one every allocation fails
PROMPT = [72, 101, 108, 108, 111]


class Allocations(TorchDispatchMode):
    """Counts allocations; the one with the number `fails` fails. `made`: what the others gave."""

    def __init__(self, fails: int | None = None) -> None:
        super().__init__()
        self.fails, self.count = fails, 0
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        results = operation(*args, **(kwargs or {}))
        for each in tree_leaves(results):
            if isinstance(each, Tensor) and not each.is_meta and each.untyped_storage()._cdata not in given:
                if self.count == self.fails:
                    raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 MiB.\nmore words")
                self.count += 1
                self.made.append(weakref.ref(each))
        return results

    @property
    def alive(self) -> int:
        """Tensors that are still held."""
        return sum(each() is not None for each in self.made)


class Unwatched:
    """Reads from the mapped file, which is no allocation, and which safetensors cannot do while a mode watches."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def read(self, name: str) -> Tensor:
        with _disable_current_modes():
            return self._checkpoint.read(name)

    def close(self) -> None:
        self._checkpoint.close()


def opened(files: ModelFiles) -> Checkpoint:
    real = open_checkpoint(files)
    return Checkpoint(real.tensors, Unwatched(real), real.quantization, real.config)


def load(files: ModelFiles) -> LoadedModel:
    return engine_load.load(files, CPU, opened=opened)


def ids(engine: Engine) -> list[int]:
    return [id for step in engine.generate(PROMPT, Sampling(), max_tokens=6) for id in step.ids]


@pytest.mark.parametrize("format", FORMATS)
def test_everything_is_freed_whichever_allocation_fails(tmp_path: Path, format: str) -> None:
    files = open_model(write_sound(tmp_path / "model", format))
    with Allocations() as all_of_them:
        first = ids(Engine(load(files)))
    assert all_of_them.count > 50
    with Allocations() as of_the_load:
        load(files)
    gc.collect()
    gc.freeze()  # a failed load collects garbage: what is here now is none, and to look through it takes long
    step = 1 if format == "plain" else max(1, of_the_load.count // INJECTIONS)
    for fails in range(0, of_the_load.count, step):
        with Allocations(fails) as allocations, pytest.raises(LocalqError, match="ran out of memory") as caught:
            load(files)
        assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
        assert allocations.count == fails
        del caught
        assert allocations.alive == 0
    assert ids(Engine(load(files))) == first
