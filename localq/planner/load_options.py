"""Options of a load: one record for front ends, the message to the engine process, and the engine. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from localq.kv_bits import KvBits
from localq.planner.placement import Wishes


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; None and "auto" leave the choice to the planner.

    name           what messages call the model; "" = as its files are called
    device         "auto", "cpu" or "cuda"
    dtype          "auto", "float32", "bfloat16" or "float16"
    ctx            context length in tokens
    kv_bits        one of `kv_bits.KV_BITS`
    vram_bytes     the most that the process takes of the GPU, its CUDA context included; None = what is free
    embed          "auto", "device" or "host": where the embedding lies
    head           "auto", "16", "8" or "nf4"
    reserve_bytes  of the GPU that stay free on top
    force          load even where the plan says that it does not fit
    """

    name: str = ""
    device: str = "auto"
    dtype: str = "auto"
    ctx: int | None = None
    kv_bits: KvBits | None = None
    vram_bytes: int | None = None
    embed: str = "auto"
    head: str = "auto"
    reserve_bytes: int = 0
    force: bool = False

    @property
    def wishes(self) -> Wishes:
        """Return the part that the planner takes. Raises LocalqError (exit 2) for unknown values."""
        return Wishes(self.ctx, self.kv_bits, self.embed, self.head)
