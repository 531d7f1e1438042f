"""The cache: static buffers for what each layer keeps (`files.layer_caches`). Knows no tokens.

Keys and values are in the type of the model or in 8 or 4 bit. Slot s holds position s, or base + s in a layer whose
window slides (`engine/sliding.py`). Nothing else is ever removed: a shorter conversation overwrites, and the attention
masks hide the slots behind the current position. Buffers start as zeros because a masked slot still enters the product
with weight 0, and 0 times an uninitialised NaN is NaN.

A quantized cache (defined by `engine/kv_codec.py`) gives passes of many tokens a dequantized copy of one layer at a
time, in a scratch buffer shared by all layers. Decode kernels read the codes themselves (`layer`).

The states of recurrent layers are changed by every token, in place. A step with drafts changes them by its first token
alone; the inputs of the drafted ones are kept, until they are replayed up to the last one that was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from localq import kv_bits
from localq.engine import kv_codec
from localq.engine.arena import Arena, arena_bytes
from localq.engine.sliding import SlidingWindow
from localq.errors import usage_error
from localq.files import layer_caches
from localq.files.layer_caches import EmptyCache, KeysAndValues, Latents, LayerCache, RecurrentState, SharedCache
from localq.kernels import attention
from localq.kernels.attention import KVLayer
from localq.kernels.checks import HALF_TYPES
from localq.kv_bits import KV_BITS, KvBits
from localq.models.layers import DraftedInputs, LayerState

Layout = Sequence[LayerCache]  # of every layer
Shape = tuple[tuple[int, ...], torch.dtype]


class KVCache:
    """The cache of all layers; implements `models.layers.Cache`.

    kv_layers   index of the layer -> its keys and values, for the layers that store any
    latents     the same for layers with latents, each [1, capacity, columns]
    states      the same for recurrent layers
    replayable  drafted tokens behind the states, whose inputs are kept; see `drafted_inputs`
    """

    def __init__(
        self,
        layout: Layout,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: KvBits = 16,
        chunk: int | None = None,
        rows: int = 1,
    ) -> None:
        """Allocate the cache for `layout` (`Decoder.cache_layout`); bits 16 = the dtype of the model.

        chunk: tokens of the longest pass, so that windows slide; None: they do not. rows: of the longest step with
        drafts. Raises LocalqError (exit 2) for heads that 8 and 4 bits do not support.
        """
        self.layout, self.capacity, self.bits, self.dtype, self.chunk = layout, capacity, bits, dtype, chunk
        self.rows, self.replayable, self._has_drafts = rows, 0, False
        _check(layout, bits)
        shapes = [_shapes(each, capacity, dtype, bits, chunk, rows) for each in layout]
        copied = 0 if bits == 16 else layer_caches.most_copied(layout, capacity, chunk)
        copies: Shape = ((2, copied), dtype)  # k, v of a layer, dequantized
        sizes = [math.prod(shape) * kind.itemsize for shape, kind in [copies, *(part for of in shapes for part in of)]]
        arena = Arena(arena_bytes(sizes), device)
        self.kv_layers: dict[int, KVLayer] = {}
        self.latents: dict[int, Tensor] = {}
        self.states: dict[int, LayerState] = {}
        self.drafted_inputs: dict[int, DraftedInputs] = {}  # of recurrent layers
        self._windows: dict[int, SlidingWindow] = {}
        for index, (kept, parts) in enumerate(zip(layout, shapes, strict=True)):
            buffers = [arena.empty(shape, kind).zero_() for shape, kind in parts]
            if isinstance(kept, KeysAndValues):
                self.kv_layers[index] = _kv_layer(buffers, bits, kept.head_dim)
                if kept.window and chunk is not None:
                    self._slide(kept, chunk, buffers)
            elif isinstance(kept, Latents):
                (self.latents[index],) = buffers
            elif isinstance(kept, RecurrentState):
                self.states[index], self.drafted_inputs[index] = LayerState(*buffers[:2]), DraftedInputs(*buffers[2:])
        self._scratch = arena.empty(*copies).zero_()

    @property
    def keys(self) -> list[Tensor]:
        """The stored keys of every layer that has any, plain or as codes."""
        return [layer.k for layer in self.kv_layers.values()]

    @property
    def values(self) -> list[Tensor]:
        """The stored values of every layer that has any, plain or as codes."""
        return [layer.v for layer in self.kv_layers.values()]

    def layer(self, index: int) -> KVLayer:
        """Return the keys and values of one layer, or those of an earlier one that it shares, for decode attention."""
        kept = self.layout[index]
        return self.layer(kept.layer) if isinstance(kept, SharedCache) else self.kv_layers[index]

    def window_of(self, layer: int) -> SlidingWindow | None:
        """Return the window of a layer, if it slides."""
        kept = self.layout[layer]
        if isinstance(kept, SharedCache):
            return self.window_of(kept.layer)
        return self._windows.get(kept.window) if isinstance(kept, KeysAndValues) else None

    def state(self, layer: int) -> LayerState:
        """Return the state of a recurrent layer, which passes change in place."""
        return self.states[layer]

    def drafted(self, layer: int) -> DraftedInputs | None:
        """Return a recurrent layer's buffers for inputs of drafted tokens; None except in a pass `with_drafts`."""
        return self.drafted_inputs[layer] if self._has_drafts else None

    @contextmanager
    def with_drafts(self) -> Iterator[None]:
        """A pass runs inside whose tokens but the first are drafted."""
        self._has_drafts = True
        try:
            yield
        finally:
            self._has_drafts = False

    @property
    def is_cuda(self) -> bool:
        """True for a cache on a GPU."""
        return self._scratch.is_cuda

    @property
    def longest_pass(self) -> int:
        """The number of tokens that fit in one pass."""
        slides = (window.chunk for window in self._windows.values() if window.capacity < self.capacity)
        return min(slides, default=self.capacity)

    def make_room(self, first: int, count: int) -> None:
        """Make room for a pass of `count` tokens at positions from `first` on, at most `longest_pass`.

        Call before each pass, in order with it on the stream of a GPU.
        """
        for window in self._windows.values():
            window.make_room(first, count)

    def keeps(self, tokens: int) -> bool:
        """True if the windows still hold all that the tokens after the first `tokens` tokens see."""
        return all(window.keeps(tokens) for window in self._windows.values())

    def view(self, window: int, live: int) -> tuple[int, int]:
        """Return (position of slot 0, slots read) of layers with `window`, for a pass over positions below `live`."""
        sliding = self._windows.get(window)
        return (0, live) if sliding is None else (sliding.base, min(live - sliding.base, sliding.capacity))

    def update(self, layer: int, k: Tensor, v: Tensor, positions: Tensor, live: int) -> tuple[Tensor, Tensor]:
        """Store k, v [T, kv_heads, head_dim] at `positions` int64 [T]; returns both as [kv_heads, slots, head_dim].

        The slots are those of `view`. The results are views: of the cache, or of the scratch of a quantized one, which
        the next call overwrites. No host synchronization: works under CUDA graph capture.
        """
        stored, window = self.kv_layers[layer], self.window_of(layer)
        slots = positions - window.base if window is not None and window.base else positions
        if self.bits == 16:
            stored.k.index_copy_(1, slots, k.transpose(0, 1))
            stored.v.index_copy_(1, slots, v.transpose(0, 1))
        elif self._has_kernels:
            attention.kv_write(stored, k, v, slots)
        else:
            key_bits, value_bits = kv_bits.split(self.bits)
            _store(stored.k, stored.k_scales, k, slots, key_bits)
            _store(stored.v, stored.v_scales, v, slots, value_bits)
        return self.read(layer, live)

    def update_latents(self, layer: int, latents: Tensor, positions: Tensor, live: int) -> Tensor:
        """Store latents [T, columns] at `positions` int64 [T]; returns a view of all, [1, live, columns]."""
        stored = self.latents[layer]
        stored[0].index_copy_(0, positions, latents)
        return stored[:, :live]

    def read(self, layer: int, live: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, or of the one that it shares, as `update` does."""
        stored, window = self.layer(layer), self.window_of(layer)
        live = live if window is None else self.view(window.window, live)[1]
        if self.bits == 16:
            return stored.k[:, :live], stored.v[:, :live]
        keys, values = (
            part[: stored.kv_heads * live * stored.head_dim].view(stored.kv_heads, live, stored.head_dim)
            for part in self._scratch
        )
        if self._has_kernels:
            attention.kv_read(stored, keys, values)
        else:
            key_bits, value_bits = kv_bits.split(self.bits)
            keys.copy_(_restore(stored.k, stored.k_scales, live, key_bits, self.dtype))
            values.copy_(_restore(stored.v, stored.v_scales, live, value_bits, self.dtype))
        return keys, values

    @property
    def _has_kernels(self) -> bool:
        """True where kernels write and read codes."""
        return self.is_cuda and self.dtype in HALF_TYPES

    # ---- the parts that a continuation of the text needs, to copy and to store

    def part_shapes(self, tokens: int) -> list[Shape]:
        """Return the shapes of `parts`."""
        found: list[Shape] = []
        for index, kept in enumerate(self.layout):
            if isinstance(kept, RecurrentState):
                found += [(tuple(part.shape), part.dtype) for part in self.states[index]]
            elif isinstance(kept, KeysAndValues):
                slots = tokens if self.window_of(index) is None else min(tokens, kept.window - 1)
                for part in stored_parts(self.kv_layers[index]):
                    found.append(((part.shape[0], slots, part.shape[2]), part.dtype))
            elif isinstance(kept, Latents):
                found.append(((1, tokens, kept.columns), self.dtype))
        return found

    def parts(self, tokens: int) -> list[Tensor]:
        """Return views of what the tokens after the first `tokens` need, layer by layer.

        k, v and, of codes, the scales of k and v, of all positions or of those that a window reaches back to; latents
        of all positions; the parts of a state, whatever `tokens`.
        """
        found: list[Tensor] = []
        for index in range(len(self.layout)):
            if index in self.states:
                found += self.states[index]
            elif index in self.kv_layers:
                window = self.window_of(index)
                slots = slice(tokens) if window is None else window.slots_of(tokens)
                found += [part[:, slots] for part in stored_parts(self.kv_layers[index])]
            elif index in self.latents:
                found.append(self.latents[index][:, :tokens])
        return found

    def passing_parts(self, tokens: int) -> list[Tensor]:
        """Return those of `parts` that later tokens overwrite: of windows that slide, and of states."""
        found = [part[:, window.slots_of(tokens)] for layer, window in self._sliding() for part in stored_parts(layer)]
        return [*found, *(part for state in self.states.values() for part in state)]

    def passing_sizes(self) -> list[int]:
        """Return the bytes of `passing_parts` of a long text."""
        found = [part.nbytes for state in self.states.values() for part in state]
        for layer, window in self._sliding():
            found += [part.nbytes // part.shape[1] * (window.window - 1) for part in stored_parts(layer)]
        return found

    def _sliding(self) -> Iterator[tuple[KVLayer, SlidingWindow]]:
        """The layers whose window is smaller than the context."""
        for index, layer in self.kv_layers.items():
            window = self.window_of(index)
            if window is not None and window.capacity < self.capacity:
                yield layer, window

    def begin(self) -> None:
        """Begin a text: windows from position 0 on, states of zeros."""
        for window in self._windows.values():
            window.restart()
        self._begin_states()

    def _begin_states(self) -> None:
        self.replayable = 0
        for state in self.states.values():
            state.matrix.zero_()
            state.columns.zero_()

    def place(self, tokens: int) -> list[Tensor]:
        """Return `parts` to be written: windows hold nothing but those of `tokens` tokens from now on."""
        for window in self._windows.values():
            window.restart(max(0, tokens - window.window + 1))
        self.replayable = 0
        return self.parts(tokens)

    def clear(self, first: int = 0) -> None:
        """Zero every position from `first` on, and all states: those of a text that has not begun.

        Needed after non-finite values, which masking does not hide.
        """
        for index, layer in self.kv_layers.items():
            window = self.window_of(index)
            for stored in stored_parts(layer):
                stored[:, max(0, first - (window.base if window else 0)) :].zero_()
        for latents in self.latents.values():
            latents[:, first:].zero_()
        for window in self._windows.values():
            window.restart(min(window.base, first))
        self._begin_states()
        self._scratch.zero_()

    def bytes(self) -> int:
        """Return the bytes allocated."""
        return sum(buffer.nbytes for buffer in self._buffers())

    @staticmethod
    def bytes_for(
        layout: Layout, capacity: int, dtype: torch.dtype, bits: KvBits = 16, chunk: int | None = None, rows: int = 1
    ) -> int:
        """Return the bytes that a cache of this shape allocates, with the scratch of a quantized one."""
        stored: KvBits = 8 * dtype.itemsize if bits == 16 else bits
        copied = 0 if bits == 16 else 2 * dtype.itemsize * layer_caches.most_copied(layout, capacity, chunk)
        slots = sum(each.slots(capacity, chunk) * each.slot_bytes(stored) for each in layer_caches.per_position(layout))
        states = layer_caches.state_bytes(layout, dtype.itemsize)
        return copied + slots + states + layer_caches.drafted_bytes(layout, dtype.itemsize, rows)

    def _slide(self, kept: KeysAndValues, chunk: int, buffers: list[Tensor]) -> None:
        """Add the buffers of a layer to its window."""
        if kept.window not in self._windows:
            slots = kept.slots(self.capacity, chunk)
            self._windows[kept.window] = SlidingWindow(kept.window, chunk, slots, buffers[0].device)
        self._windows[kept.window].add(buffers)

    def _buffers(self) -> list[Tensor]:
        stored = (part for layer in self.kv_layers.values() for part in stored_parts(layer))
        recurrent = (*self.states.values(), *self.drafted_inputs.values())
        return [*stored, *self.latents.values(), *(part for layer in recurrent for part in layer), self._scratch]


def stored_parts(layer: KVLayer) -> list[Tensor]:
    """Return the buffers of a layer, each [kv_heads, capacity, ...]: k, v, and for codes the scales of k and of v."""
    return [part for part in (layer.k, layer.v, layer.k_scales, layer.v_scales) if part is not None]


def _check(layout: Layout, bits: KvBits) -> None:
    if bits not in KV_BITS:
        raise usage_error("--kv", f"{bits} is not a supported KV cache precision", "Use 16, 8, k8v4 or 4.")
    if bits != 16 and any(isinstance(each, Latents) for each in layout):
        raise usage_error("--kv", "this model has a latent KV cache, which supports only 16 bits", "Use --kv 16.")
    for width in {each.head_dim for each in layer_caches.keys_and_values(layout)}:
        if bits != 16 and (width % 8 or width > kv_bits.MOST_CODED_COLUMNS):
            why = (
                f"a KV cache below 16 bits requires a head dimension divisible by 8, up to 256; this model's is {width}"
            )
            raise usage_error("--kv", why, "Use --kv 16.")


def _shapes(
    kept: LayerCache, capacity: int, dtype: torch.dtype, bits: KvBits, chunk: int | None, rows: int
) -> list[Shape]:
    """Return the shapes of k and v, and of their scales where they are codes; or of a state and of drafted inputs."""
    if isinstance(kept, RecurrentState):
        matrix: Shape = ((kept.heads, kept.key_dim, kept.value_dim), torch.float32)
        rates: Shape = ((rows - 1, kept.heads), torch.float32)
        return [matrix, ((kept.channels, kept.columns), dtype), ((rows - 1, kept.channels), dtype), rates, rates]
    if isinstance(kept, SharedCache | EmptyCache):
        return []
    slots = kept.slots(capacity, chunk)
    if isinstance(kept, Latents):
        return [((1, slots, kept.columns), dtype)]
    plain: Shape = ((kept.kv_heads, slots, kept.head_dim), dtype)
    if bits == 16:
        return [plain, plain]
    codes: list[Shape] = [
        ((kept.kv_heads, slots, kept.head_dim * part // 8), torch.uint8) for part in kv_bits.split(bits)
    ]
    scales: Shape = ((kept.kv_heads, slots, kv_bits.scale_count(kept.head_dim)), torch.float16)
    return [*codes, scales, scales]


def _kv_layer(buffers: list[Tensor], bits: KvBits, width: int) -> KVLayer:
    k, v, *scales = buffers
    k_scales, v_scales = scales or (None, None)
    return KVLayer(k, v, k_scales, v_scales, bits, width)


def _store(codes: Tensor, scales: Tensor | None, dense: Tensor, positions: Tensor, bits: int) -> None:
    assert scales is not None
    new_codes, new_scales = kv_codec.quantize(dense.transpose(0, 1), bits)
    codes.index_copy_(1, positions, new_codes)
    scales.index_copy_(1, positions, new_scales)


def _restore(codes: Tensor, scales: Tensor | None, live: int, bits: int, dtype: torch.dtype) -> Tensor:
    assert scales is not None
    return kv_codec.dequantize(codes[:, :live], scales[:, :live], bits, dtype)
