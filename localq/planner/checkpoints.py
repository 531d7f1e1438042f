"""Host memory for checkpoints of a conversation (`engine.checkpoints`): what one takes, and how many are kept.

Torch-free. Only models with recurrent layers or sliding windows need any: their cache cannot be cut anywhere.
"""

from __future__ import annotations

from localq.errors import ExitCode, LocalqError
from localq.files import layer_caches
from localq.files.architecture import Architecture
from localq.kv_bits import KvBits
from localq.wording import human_bytes

KEPT = 8  # by default: the system prompt, and both ends of the last replies
LEAST, ENOUGH = 2, 2 * 2**30  # where these are large, as windows are: so many of them, or in so many bytes
SHARE = 4  # of the free RAM at most one part in so many, by default


def bytes_of_one(arch: Architecture, kv_bits: KvBits, itemsize: int, ctx: int, chunk: int | None) -> int:
    """Bytes of one checkpoint; 0 if the model needs none. chunk as of `footprint.window_chunk`; kv_bits 16 or less."""
    bits = 8 * itemsize if kv_bits == 16 else kv_bits
    windows = layer_caches.windowed_bytes(arch.layer_caches, bits) if chunk is not None else {}
    slid = sum((window - 1) * size for window, size in windows.items() if window + (chunk or 0) < ctx)
    return layer_caches.state_bytes(arch.layer_caches, itemsize) + slid


def budget(one: int, wished: int | None, free_ram: int) -> int:
    """Bytes for checkpoints of `one` byte each, of `free_ram`, which is what remains beside the model.

    wished: those that the user asks for; None: up to `KEPT`, and no more than a part of the RAM. Raises LocalqError
    (exit 3) where the RAM is too small for a wish.
    """
    if not one:
        return 0
    if wished is None:
        return one * max(0, min(KEPT, max(LEAST, ENOUGH // one), free_ram // SHARE // one))
    if wished > max(free_ram, 0):
        why = f"not enough free RAM: need {human_bytes(wished)}, have {human_bytes(max(free_ram, 0))}"
        step = f"Use a smaller value; one checkpoint of this model takes {human_bytes(one)}."
        raise LocalqError("--checkpoints", why, step, ExitCode.DOES_NOT_FIT)
    return wished
