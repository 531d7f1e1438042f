"""Placement of embedding, head and KV cache: wishes of the user, and memory-saving steps. Torch-free."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from localq import kv_bits
from localq.drafts import rows_for
from localq.errors import usage_error
from localq.files.architecture import Architecture
from localq.kv_bits import K8V4, KV_BITS, MOST_CODED_COLUMNS, KvBits
from localq.planner.draft_shape import DraftShape

EMBEDS, HEADS = ("auto", "device", "host"), ("auto", "16", "8", "nf4")
# Steps that save memory, in order. The first two change neither replies nor speed. The table of a tied model is its
# head too, so it can move to the host only after the head is a separate tensor. Keys of 4 bit are not for models that
# add biases to them: a few columns of those are so much larger than the others that Qwen2.5 writes nonsense.
STEPS: tuple[Mapping[str, int | str], ...] = (
    {"input_table": "host"},
    {"embed": "host"},
    {"head": "8", "embed": "host"},
    {"kv_bits": 8},
    {"head": "nf4", "embed": "host"},
    {"kv_bits": K8V4},
    {"kv_bits": 4},
)
STORED = "stored"  # the head in the format of the files (`Architecture.stored_head`)
HEAD_COLUMNS = {"16": 1, "8": 16, "nf4": 64, STORED: 1}  # the format needs a multiple of this
HEAD_NAMES = {"16": "16-bit", "8": "8-bit", "nf4": "NF4", STORED: "as in the file"}


@dataclass(frozen=True)
class Placement:
    """Placement of embedding, head and KV cache, and their bits.

    kv_bits  bits of an element of the KV cache: 16 (the type of the model), 8 or 4, or `kv_bits.K8V4`
    embed    "device", or "host": the table in pinned host memory, from which a token reads one row
    head     "16" (the type of the model), "8", "nf4" or `STORED`; a tied model then gets a separate head, and keeps its
             table
    input_table  as `embed`, of the table of what layers add per token, where the model has one
    rows     of the longest pass of the decode step: more than one where drafts are verified (`localq.drafts`)
    """

    kv_bits: KvBits = 16
    embed: str = "device"
    head: str = "16"
    rows: int = 1
    input_table: str = "device"

    def is_as_good_as(self, other: Placement) -> bool:
        """Return whether both give the same replies: they differ only in where tables are."""
        return (self.kv_bits, self.head) == (other.kv_bits, other.head)


@dataclass(frozen=True)
class PlacedShape:
    """Properties of a model that its placements depend on.

    odd_columns  columns of the head behind the last whole block of every format
    """

    tied: bool
    odd_columns: int
    has_stored_head: bool
    has_inputs: bool
    qkv_bias: bool
    kv_storable: bool

    @classmethod
    def of(cls, arch: Architecture) -> PlacedShape:
        """Of a model."""
        odd = arch.hidden % max(HEAD_COLUMNS.values())
        return cls(arch.tied, odd, arch.stored_head > 0, arch.input_width > 0, arch.qkv_bias, kv_storable(arch))


@dataclass(frozen=True)
class Wishes:
    """Choices of the user; None and "auto" leave them to the planner.

    draft_tokens   of a draft, at most; 0: no drafts
    draft          the draft model, if there is one
    mtp            without one, the MTP block of a model that has one drafts (`Architecture.mtp`)

    Raises LocalqError (exit 2) for other values.
    """

    ctx: int | None = None
    kv_bits: KvBits | None = None
    embed: str = "auto"
    head: str = "auto"
    draft_tokens: int = 0
    draft: DraftShape | None = None
    mtp: bool = False

    def __post_init__(self) -> None:
        if self.kv_bits is not None and self.kv_bits not in KV_BITS:
            raise usage_error("--kv", f"{self.kv_bits} is not a supported KV cache precision", "Use 16, 8, k8v4 or 4.")
        if self.embed not in EMBEDS:
            raise usage_error("--embed", f"'{self.embed}' is not supported", f"Use one of {', '.join(EMBEDS)}.")
        if self.head not in HEADS:
            raise usage_error("--head", f"'{self.head}' is not supported", f"Use one of {', '.join(HEADS)}.")

    def placements(self, arch: Architecture) -> list[Placement]:
        """The placements to try: the best, then with one more step of `STEPS` at a time; the last needs least memory.

        With a new step, what earlier steps reduced is tried again unreduced, so that nothing is reduced in vain.
        """
        return [*_placements(self, PlacedShape.of(arch))]

    def placements_of(self, arch: PlacedShape) -> list[Placement]:
        """As `placements`."""
        head = self._first_head(arch)
        embed, rows = "device" if self.embed == "auto" else self.embed, rows_for(1 + self.draft_tokens)
        last = Placement(self.kv_bits or 16, embed, head, rows, embed if arch.has_inputs else "device")
        found, caches, ends = [last], [last.kv_bits], [last]  # ends: where embedding and head are
        for step in STEPS:
            tried = replace(last, **self._open(step, arch))
            if tried == last or not _saves(arch, tried, step):
                continue
            if tried.is_as_good_as(last):  # nothing speaks against this step, so that all later ones have it
                ends, new = [tried], [tried]
            elif tried.kv_bits != last.kv_bits:
                caches, new = [*caches, tried.kv_bits], [replace(end, kv_bits=tried.kv_bits) for end in ends]
            else:
                ends, new = [*ends, tried], [replace(tried, kv_bits=bits) for bits in caches]
            found += new
            last = tried
        return found

    def _first_head(self, arch: PlacedShape) -> str:
        if self.head != "auto":
            return self.head
        if arch.has_stored_head:
            return STORED
        # Every token reads the whole head, so only the table can leave the device.
        return "8" if arch.tied and self.embed == "host" else "16"

    def _open(self, step: Mapping[str, int | str], arch: PlacedShape) -> dict[str, Any]:
        """The part of a step that the user and the files leave to the planner."""
        is_open = {
            "kv_bits": self.kv_bits is None,
            "embed": self.embed == "auto",
            "head": self.head == "auto" and not arch.has_stored_head,
            "input_table": True,
        }
        return {name: value for name, value in step.items() if is_open[name]}

    def check(self, arch: Architecture) -> None:
        """Raises LocalqError (exit 2) for wishes that this shape does not support."""
        if self.kv_bits not in (None, 16) and not kv_storable(arch):
            width = max(each.head_dim for each in arch.attention_shapes)
            why = f"a KV cache below 16 bits is not supported for a head dimension of {width}"
            if arch.kv_latent:
                why = "this model has a latent KV cache, which supports only 16 bits"
            raise usage_error("--kv", why, "Use 16.")
        head = self._first_head(PlacedShape.of(arch))
        columns = HEAD_COLUMNS[head]
        if arch.hidden % columns:
            why = f"{HEAD_NAMES[head]} heads require a column count divisible by {columns}; this head has {arch.hidden}"
            step = "Use 16." if self.embed != "host" or not arch.tied else "Use --head 16 with --embed device."
            raise usage_error("--head", why, step)
        if self.embed == "host" and arch.tied and self.head == "16":
            why = "this model's embedding is also its output head, which the GPU reads in full for every token"
            raise usage_error("--embed", why, "Add --head 8 or --head nf4, or use --embed device.")

    def choice(self, placement: Placement, arch: Architecture) -> str:
        """Return, in one line, what the planner reduces with `placement` to save memory, or a wish may spoil; or empty.

        The place of the embedding is left out: it changes neither replies nor speed.
        """
        if self.kv_bits == 4 and arch.qkv_bias:
            return "this model adds biases to its keys, so 4-bit keys may garble its replies; use --kv k8v4"
        is_reduced = placement.head not in ("16", STORED)
        changes = (
            (self.head == "auto" and is_reduced, f"head {HEAD_NAMES[placement.head]} (--head)"),
            (self.kv_bits is None and placement.kv_bits != 16, f"KV cache {kv_bits.text(placement.kv_bits)} (--kv)"),
        )
        made = [text for is_made, text in changes if is_made]
        return f"saves memory: {', '.join(made)}" if made else ""


@functools.lru_cache(maxsize=256)
def _placements(wishes: Wishes, shape: PlacedShape) -> tuple[Placement, ...]:
    """Placements, cached: models of the same properties share them, which shortens lists of models."""
    return tuple(wishes.placements_of(shape))


def _saves(arch: PlacedShape, tried: Placement, step: Mapping[str, int | str]) -> bool:
    """Return whether the step is possible and saves memory."""
    if "input_table" in step:
        return arch.has_inputs
    if "kv_bits" in step:
        return arch.kv_storable and not (step["kv_bits"] == 4 and arch.qkv_bias)
    if arch.tied and (tried.embed == "host") != (tried.head != "16"):
        return False  # a separate head saves memory only if the table leaves the device
    return arch.odd_columns % HEAD_COLUMNS[tried.head] == 0


def draft_placement(arch: Architecture, kv_bits: KvBits) -> Placement:
    """Placement of a draft model, beside a model whose KV cache has `kv_bits`."""
    fewest = kv_bits == 16 or (kv_storable(arch) and not (kv_bits == 4 and arch.qkv_bias))
    return Placement(kv_bits if fewest else 16, head=STORED if arch.stored_head else "16")


def kv_storable(arch: Architecture) -> bool:
    """Return whether 8-bit and 4-bit KV caches support heads of this width; they do not support latents."""
    fits = all(each.head_dim % 8 == 0 and each.head_dim <= MOST_CODED_COLUMNS for each in arch.attention_shapes)
    return fits and not arch.kv_latent
