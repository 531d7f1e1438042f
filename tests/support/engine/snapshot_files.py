"""Caches with every byte random, their snapshots, and how one is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localq.engine import snapshot
from localq.engine.cache import KVCache, stored_parts
from localq.engine.load.load import LoadedModel
from localq.errors import LocalqError
from localq.kv_bits import KvBits

WEIGHTS = "w" * 64
TOKENS = 41


def with_cache(
    loaded: LoadedModel, dtype: torch.dtype, bits: KvBits, capacity: int, device: str = "cpu"
) -> LoadedModel:
    """`loaded` with a cache of another form, every byte of it random."""
    cache = KVCache(loaded.model.cache_layout(), capacity, dtype, device, bits)
    generator = torch.Generator().manual_seed(capacity)
    for layer in cache.kv_layers.values():
        for part in stored_parts(layer):
            count = part.numel() * part.element_size()
            part.view(torch.uint8).copy_(
                torch.randint(256, (count,), generator=generator, dtype=torch.uint8).view(part.view(torch.uint8).shape)
            )
    return replace(loaded, cache=cache, ctx=capacity, dtype=dtype, kv_bits=bits)


def stored(model: LoadedModel, positions: int) -> bytes:
    """What the first slots hold, byte for byte."""
    layers = model.cache.kv_layers.values()
    parts = [part[:, :positions].contiguous() for layer in layers for part in stored_parts(layer)]
    return b"".join(part.view(torch.uint8).cpu().numpy().tobytes() for part in parts)


def behind(model: LoadedModel, positions: int) -> bytes:
    """What the others hold."""
    layers = model.cache.kv_layers.values()
    parts = [part[:, positions:].contiguous() for layer in layers for part in stored_parts(layer)]
    return b"".join(part.view(torch.uint8).cpu().numpy().tobytes() for part in parts)


def restored(path: Path, model: LoadedModel, weights: str = WEIGHTS) -> list[int]:
    with snapshot.Snapshot(path, model, weights) as found:
        found.restore()
        return found.ids


def refusal(path: Path, model: LoadedModel, weights: str = WEIGHTS) -> LocalqError:
    with pytest.raises(LocalqError, match=r"^snapshot not used: ") as caught:
        restored(path, model, weights)
    return caught.value
