"""The order in which an owner of a card would choose: quality, then context and speed. Torch-free.

Quality is the score of the model in models.toml, which is of unquantized weights, less what its bits cost. The rest is
a judgement, in points of the same scale.
"""

from __future__ import annotations

import math

from localq.files.architecture import Architecture
from localq.kv_bits import K8V4, KvBits
from localq.planner import footprint
from localq.planner import plan as memory_plan
from localq.planner.offers import Offer
from localq.planner.placement import Placement

# Least bits per weight, and the size of a 16-bit model of equal quality, relative to that of the model. 2 bits: VPTQ's
# authors report a perplexity of 3.93 for Llama 2 70B at 2.07 bits; in 16 bit 13B has 4.57 and 70B 3.12 (AQLM's README).
WORTH = ((6.0, 1.0), (3.8, 0.95), (2.4, 0.80), (0.0, 0.35))
# Points for a doubling of the parameters below and above `LARGE`; their source is at the head of models.toml.
SMALL_POINTS, LARGE_POINTS, LARGE = 33.0, 18.0, 12e9
# A model without a score counts as one of 2024 of its size: that of llama-3.1-8b, and its parameters.
USUAL_SCORE, USUAL_SIZE = 1212.0, 8.03e9
CONTEXT_POINTS = 20.0  # for a halving of the context below what is comfortable
SPEED_POINTS, FAST = 8.0, 60.0  # for a halving of tok/s below `FAST`
DEFAULT_POINTS = 3.0  # for the format that the catalogue recommends
KV_POINTS: dict[KvBits, float] = {16: 0.0, 8: 1.0, K8V4: 5.0, 4: 12.0}  # for a KV cache of fewer bits
HEAD_POINTS = {"16": 0.0, "8": 0.0, "nf4": 4.0}
MADE_POINTS = 20.0  # for weights to quantize here first: the 16-bit download, disk for both, minutes to hours


def quality(offer: Offer) -> float:
    """Expected score of an offer: of its model, less the loss by its bits."""
    return model_score(offer) - loss(offer)


def model_score(offer: Offer) -> float:
    """The score of the unquantized model; one without a score counts as a usual one of its size."""
    if offer.entry is not None and offer.entry.score:
        return float(offer.entry.score)
    return USUAL_SCORE + _points(_size(offer.arch)) - _points(USUAL_SIZE)


def is_estimated(offer: Offer) -> bool:
    """Return whether the model's score is not published, but derived from a related or typical model's."""
    return offer.entry is None or not offer.entry.score or offer.entry.estimated


def loss(offer: Offer) -> float:
    """Points that the bits of an offer cost; weights that are quantized twice lose twice."""
    worth = _worth(offer.stored_bits)
    if offer.quantized_before:
        scheme = offer.base.scheme if offer.base else ""
        worth *= _worth(footprint.bits_per_weight(offer.arch, offer.quantized_before, scheme))
    size = _size(offer.arch)
    return _points(size) - _points(worth * size)


def value(offer: Offer, placement: Placement, ctx: int, tok_s: float | None, *, is_made: bool = False) -> float:
    """Return the value of an offer on a card where it has this placement, context and speed.

    is_made   it was quantized here already
    """
    worth = quality(offer) - KV_POINTS[placement.kv_bits] - HEAD_POINTS[placement.head]
    comfortable = memory_plan.THINKING_CONTEXT if offer.arch.thinks else memory_plan.COMFORTABLE_CONTEXT
    if 0 < ctx < comfortable:
        worth -= CONTEXT_POINTS * math.log2(comfortable / ctx)
    if tok_s is not None and tok_s < FAST:
        worth -= SPEED_POINTS * math.log2(FAST / tok_s)
    if offer.preferred:
        worth += DEFAULT_POINTS
    if offer.is_made_here and not is_made:
        worth -= MADE_POINTS
    return worth


def _worth(bits: float) -> float:
    return next(worth for least, worth in WORTH if bits >= least)


def _size(arch: Architecture) -> float:
    """Parameters; of a mixture of experts the geometric mean of all and of those that a token uses."""
    idle = arch.linear_parameters - arch.active_linear_parameters
    return math.sqrt(arch.parameters * (arch.parameters - idle))


def _points(parameters: float) -> float:
    """Points of a size, from an arbitrary zero; differences are those of two sizes of a family."""
    doublings = math.log2(parameters / LARGE)
    return doublings * (LARGE_POINTS if doublings > 0 else SMALL_POINTS)


def chats(offer: Offer) -> bool:
    """Return whether a model can hold a conversation, as far as the catalogue knows."""
    return offer.entry is None or not offer.entry.base
