"""Caches of the layers of a model, by kind, and their bytes. Torch-free, for the planner and the engine alike.

    KeysAndValues    of every position, or, with a window, of those that the next tokens can see
    Latents          of every position a vector, from which all heads make their keys and values
    SharedCache      nothing: the layer reads the keys and values of an earlier one
    EmptyCache       nothing: the layer looks at one token at a time
    RecurrentState   a fixed amount, which every token changes: no earlier state can be had back from it. Of drafted
                     tokens the inputs are kept, and replayed once they are accepted

Sizes are in elements and tokens; `bits` and `itemsize` are those of `kv_bits` and of the type of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from localq import kv_bits
from localq.kv_bits import KvBits


@dataclass(frozen=True)
class KeysAndValues:
    """Keys and values, vectors of head_dim per KV head.

    window   tokens that a token sees, itself included; 0: all, so that the layer grows with the context
    """

    kv_heads: int
    head_dim: int
    window: int = 0

    @property
    def width(self) -> int:
        """Elements of the keys of one position, and as many of the values."""
        return self.kv_heads * self.head_dim

    def slots(self, context: int, chunk: int | None) -> int:
        """Positions that a text of `context` tokens needs in memory, in passes of at most `chunk` tokens.

        None: windows do not slide, so that every position stays.
        """
        return min(context, self.window + chunk) if self.window and chunk is not None else context

    def slot_bytes(self, bits: KvBits) -> int:
        """Bytes of one position."""
        return self.kv_heads * kv_bits.pair_bytes(self.head_dim, bits)


@dataclass(frozen=True)
class Latents:
    """A vector per position, which all heads read: the latent, and behind it the part of their keys that turns.

    columns   of both; they stay in the type of the model
    """

    columns: int
    window: ClassVar[int] = 0

    def slots(self, context: int, chunk: int | None) -> int:
        """Positions that a text of `context` tokens needs in memory: all."""
        return context

    def slot_bytes(self, bits: KvBits) -> int:
        """Bytes of one position; bits: 16 or 32."""
        return kv_bits.plain_bytes(self.columns, bits)


@dataclass(frozen=True)
class SharedCache:
    """The keys and values of the earlier layer `layer`."""

    layer: int


@dataclass(frozen=True)
class EmptyCache:
    """Nothing, of a layer without a part that mixes tokens."""


@dataclass(frozen=True)
class RecurrentState:
    """A matrix per head, f32 [heads, key_dim, value_dim], and what a causal convolution still needs of its input.

    channels, columns   of that: the last `columns` inputs, in the type of the model
    """

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    columns: int

    def bytes(self, itemsize: int) -> int:
        """Bytes, whatever the context."""
        return 4 * self.heads * self.key_dim * self.value_dim + itemsize * self.channels * self.columns

    def drafted_bytes(self, itemsize: int, rows: int) -> int:
        """Bytes of the inputs of drafted tokens in a step of up to `rows` rows, of which the first is not drafted.

        Of each token what the convolution reads, and decay and beta of every head in f32.
        """
        return (rows - 1) * (itemsize * self.channels + 2 * 4 * self.heads)


PerPosition = KeysAndValues | Latents
LayerCache = PerPosition | SharedCache | EmptyCache | RecurrentState


def keys_and_values(caches: Iterable[LayerCache]) -> list[KeysAndValues]:
    """Return the caches that store keys and values, in order."""
    return [each for each in caches if isinstance(each, KeysAndValues)]


def per_position(caches: Iterable[LayerCache]) -> list[PerPosition]:
    """Return the caches that store something for each position, or for those in a window, in order."""
    return [each for each in caches if isinstance(each, PerPosition)]


def read(caches: Sequence[LayerCache]) -> list[LayerCache]:
    """Return the cache each layer reads: its own, or that of the layer whose keys and values it shares."""
    return [caches[each.layer] if isinstance(each, SharedCache) else each for each in caches]


def growing_bytes(caches: Iterable[LayerCache], bits: KvBits) -> int:
    """Bytes per token of the layers that grow with the context."""
    return sum(each.slot_bytes(bits) for each in per_position(caches) if not each.window)


def windowed_bytes(caches: Iterable[LayerCache], bits: KvBits) -> dict[int, int]:
    """Window -> bytes per token in it of all layers with this window."""
    found: dict[int, int] = {}
    for each in keys_and_values(caches):
        if each.window:
            found[each.window] = found.get(each.window, 0) + each.slot_bytes(bits)
    return found


def state_bytes(caches: Iterable[LayerCache], itemsize: int) -> int:
    """Bytes of the states of recurrent layers."""
    return sum(each.bytes(itemsize) for each in caches if isinstance(each, RecurrentState))


def drafted_bytes(caches: Iterable[LayerCache], itemsize: int, rows: int) -> int:
    """Bytes of the inputs of drafted tokens that recurrent layers keep in steps of up to `rows` rows."""
    return sum(each.drafted_bytes(itemsize, rows) for each in caches if isinstance(each, RecurrentState))


def most_copied(caches: Iterable[LayerCache], context: int, chunk: int | None) -> int:
    """Elements that hold the keys of any layer, with the slots of `KeysAndValues.slots`; 0 if none has any.

    The widest of layers that grow, and what a layer whose window slides has more per slot: a straight line in the
    context on either side of the window, so that the planner can solve for it.
    """
    found = keys_and_values(caches)
    slides = [each for each in found if each.window and chunk is not None]
    growing = max((each.width for each in found if each not in slides), default=0)
    more = max((max(each.width - growing, 0) * each.slots(context, chunk) for each in slides), default=0)
    return growing * context + more
