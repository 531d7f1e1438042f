"""Bytes that one decode step must read: counted over the tensors that are there, not over a formula of the model."""

from __future__ import annotations

from localq.bench.models.plan import Case
from localq.engine.load.load import LoadedModel
from localq.engine.load.stacks import idle_bytes


def per_token(model: LoadedModel, length: float) -> int:
    """At `length` live positions: every weight once with its scales, one embedding row, keys and values.

    A windowed layer reads no more than its window. Where the head is the embedding table, the table is read whole.
    """
    return weights(model) + round(kv(model, length))


def weights(model: LoadedModel) -> int:
    """All parameters and buffers, shared storage once; of an embedding table that is not the head one row, of a layer
    with experts those that a token goes through."""
    decoder = model.model
    tensors = {tensor.data_ptr(): tensor for tensor in (*decoder.parameters(), *decoder.buffers())}
    count = sum(tensor.nbytes for tensor in tensors.values()) - idle_bytes(decoder)
    table = decoder.embed_tokens.weight
    return count - table.nbytes + table[0].nbytes if decoder.lm_head is not None else count


def kv(model: LoadedModel, length: float) -> float:
    """Keys and values, with their scales, of `length` positions over all layers."""
    total = 0.0
    for layer, window in enumerate(model.model.config.windows):
        total += model.cache.layer(layer).bytes_per_slot() * (min(length, window) if window else length)
    return total


def mean_length(case: Case) -> float:
    """Live positions of a decode case, averaged over its steps: the first step sees start + 1 of them."""
    return case.start + (case.generate + 1) / 2
