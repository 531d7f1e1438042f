"""Options of a load: one record for front ends, the message to the engine process, and the engine.

Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

from localq.kv_bits import KvBits
from localq.planner.placement import Wishes


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load; None and "auto" leave the choice to the planner.

    name           name of the model in messages; "" = that of its files
    device         "auto", "cpu" or "cuda"
    dtype          "auto", "float32", "bfloat16" or "float16"
    ctx            context length in tokens
    kv_bits        one of `kv_bits.KV_BITS`
    vram_bytes     limit of GPU memory of the process, CUDA context included; None = the free memory
    embed          "auto", "device" or "host": where the embedding lies
    head           "auto", "16", "8" or "nf4"
    reserve_bytes  GPU memory that stays free in addition
    force          load even if the plan does not fit
    checkpoint_bytes  host memory for checkpoints (`planner.checkpoints`); None = as many as are useful
    draft_tokens   of a draft that a step can verify, at most; 0: drafts are off
    draft_path     folder or .gguf file of a draft model; "" = none. draft_name: its name in messages
    mtp            drafts of the model's MTP block: "auto" where it has one, "mtp" (an error where not), "" = none
    thinks         replies may begin with a thought: `Architecture.thinks`, which the configuration does not state
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
    thinks: bool = False
    checkpoint_bytes: int | None = None
    draft_tokens: int = 0
    draft_path: str = ""
    draft_name: str = ""
    mtp: str = ""

    @property
    def wishes(self) -> Wishes:
        """The options that the planner decides about. Raises LocalqError (exit 2) for unknown values."""
        return Wishes(self.ctx, self.kv_bits, self.embed, self.head, self.draft_tokens)
