"""Bytes that one decode step must read, counted over the loaded tensors."""

from __future__ import annotations

from localq.bench.models.plan import BenchTest
from localq.engine.load.load import LoadedModel
from localq.engine.load.stacks import idle_bytes
from localq.files.layer_caches import KeysAndValues, Latents


def per_token(model: LoadedModel, length: float) -> int:
    """Return the bytes at `length` live positions: weights with scales, one embedding row, keys and values.

    A windowed layer reads at most its window. A tied head reads the whole embedding table.
    """
    return weights(model) + round(kv(model, length))


def weights(model: LoadedModel) -> int:
    """Return the bytes of weights: shared storage once, one row of an untied embedding, only the active experts."""
    decoder = model.model
    tensors = {tensor.data_ptr(): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
    count = sum(tensor.nbytes for tensor in tensors.values()) - idle_bytes(decoder)
    table = decoder.embed_tokens.weight
    return count - table.nbytes + table[0].nbytes if decoder.lm_head is not None else count


def kv(model: LoadedModel, length: float) -> float:
    """Return the bytes that a step reads of `length` positions, with scales, and of states, read and written."""
    total, cache = 0.0, model.cache
    for index, kept in enumerate(cache.layout):
        if isinstance(kept, KeysAndValues):
            total += cache.layer(index).bytes_per_slot() * (min(length, kept.window) if kept.window else length)
        elif isinstance(kept, Latents):
            total += kept.slot_bytes(8 * cache.dtype.itemsize) * length
    return total + 2 * sum(part.nbytes for state in cache.states.values() for part in state)


def mean_length(case: BenchTest) -> float:
    """Return the mean number of live positions in a decode case; its first step sees start + 1."""
    return case.start + (case.generate + 1) / 2
