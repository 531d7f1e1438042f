"""Rotary position embedding: the frequencies of every scaling we know, and the tables made from them.

A head's first `rotary_dim` columns form pairs (i, i + rotary_dim/2); the pair at position p turns by the angle
p * frequency[i]. Scalings change the frequencies, and yarn and longrope also scale cos and sin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """One kind of rotary embedding; every layer that uses the same kind shares one table.

    kind               a key of `FREQUENCIES`
    theta              base of the geometric series of wavelengths
    rotary_dim         columns of a head that turn (even); the others pass through
    factor             context extension, for all kinds but "default"
    original_context   positions of the pretraining ("llama3", "yarn", "longrope")
    attention_factor   multiplies cos and sin ("yarn", "longrope")
    low_frequency_factor, high_frequency_factor   borders of the blend of "llama3", in turns per original context
    beta_fast, beta_slow, truncate                borders of the blend of "yarn"
    turning            columns that turn, of the first and of the second half as many ("proportional"); the others have
                       an angle of 0
    short_factor, long_factor                     one divisor per frequency for "longrope" [rotary_dim / 2]
    """

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    turning: int = 0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def frequencies(self, length: int) -> Tensor:
        """Radians per position, f32 [rotary_dim / 2], on the CPU. Only "longrope" looks at `length`, of the text."""
        return FREQUENCIES[self.kind](self, length)

    def switches_within(self, context: int) -> bool:
        """True where texts of up to `context` tokens do not all turn by the same angles (`LengthSwitch`)."""
        return self.kind == "longrope" and self.original_context < context

    def table(self, context: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """`dtype` [context, 2, rotary_dim] for a text of `context` tokens.

        Holds cos, and sin with the sign that `rotate` needs, per position.
        """
        return self.rows(context, context, dtype).to(device)

    def rows(self, count: int, length: int, dtype: torch.dtype) -> Tensor:
        """The first `count` rows of the table for a text of `length` tokens, on the CPU.

        The angles are f32 as in transformers, and rounded to `dtype` last. Made on the CPU, so that every device
        holds the same numbers.
        """
        angles = torch.arange(count, dtype=torch.float32)[:, None] * self.frequencies(length)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1).to(dtype)

    def table_bytes(self, context: int, itemsize: int) -> int:
        """Bytes of `table`."""
        return context * 2 * self.rotary_dim * itemsize


class LengthSwitch:
    """Adapts the table of a "longrope" to the length of the text.

    A text of up to `original_context` tokens, prompt and reply, turns by the short list at all its positions, a longer
    one by the long list: as the model was trained, and as transformers chooses. Keys are cached after they have turned,
    so a change of the list makes cached keys useless: where a text crosses `original_context`, its keys are computed
    again, once (transformers does the same).

    Only rows below `original_context` differ. Both versions of these are held in host memory; the table on the device
    keeps its place, so that captured graphs and fused launches read the chosen list.
    """

    def __init__(self, rope: Rope, table: Tensor) -> None:
        """Switch `table`, which `rope.table` made for a context beyond `original_context`, in place."""
        self.original_context = rope.original_context
        self._table = table
        lengths = (rope.original_context, rope.original_context + 1)
        self._rows = tuple(rope.rows(rope.original_context, length, table.dtype) for length in lengths)
        self._is_long = True

    def choose(self, length: int) -> bool:
        """Choose the list for a text of `length` tokens; True if another one was chosen before."""
        is_long = length > self.original_context
        if is_long == self._is_long:
            return False
        self._table[: self.original_context].copy_(self._rows[is_long])
        self._is_long = is_long
        return True

    def rows(self, count: int) -> Tensor:
        """The first rows of the table, as they are for a text of `count` tokens [count, 2, rotary_dim]."""
        if count > self.original_context:
            return torch.cat((self._rows[True], self._table[self.original_context : count].cpu()))
        return self._rows[False][:count]


def query_scales(growth: float, period: int, context: int, dtype: torch.dtype) -> Tensor:
    """Return the scale of the rotated queries by position: 1 + growth ln(1 + floor(position / period)) [context].

    For texts longer than those of the pretraining, over which attention would spread ever thinner; 1 below `period`.
    On the CPU, in f32 as in transformers and rounded to `dtype` last.
    """
    return (1 + growth * torch.log(1 + torch.floor(torch.arange(context) / period))).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim] turned by cos and signed sin, each [T, 1, rotary_dim] -> the same shape.

    (a, b) -> (a cos - b sin, b cos + a sin). The minus lives in the table, so a roll replaces negate and join.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return (x * cos).addcmul_(x.roll(rotary_dim // 2, -1), sin)
    turning, passing = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat(((turning * cos).addcmul_(turning.roll(rotary_dim // 2, -1), sin), passing), -1)


def _default(rope: Rope, length: int) -> Tensor:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    return 1.0 / (rope.theta**exponents)


def _linear(rope: Rope, length: int) -> Tensor:
    return _default(rope, length) / rope.factor


def _proportional(rope: Rope, length: int) -> Tensor:
    """Gemma 4: the exponents are those of the whole head, but only the first pairs turn."""
    frequencies = _linear(rope, length)
    frequencies[rope.turning // 2 :] = 0.0
    return frequencies


def _llama3(rope: Rope, length: int) -> Tensor:
    """Slow pairs (wavelength above original/low) are divided by the factor, fast ones kept, those between blended."""
    frequencies = _default(rope, length)
    turns = rope.original_context * frequencies / (2 * math.pi)  # over the original context
    span = rope.high_frequency_factor - rope.low_frequency_factor
    keep = ((turns - rope.low_frequency_factor) / span).clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: Rope, length: int) -> Tensor:
    """YaRN (arXiv 2309.00071, section 3.2): as llama3, but the blend is linear in the pair's index."""

    def pair_with_turns(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # the reference's guard against an empty border
    divide = ((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    frequencies = _default(rope, length)
    return frequencies / rope.factor * divide + frequencies * (1 - divide)


def _longrope(rope: Rope, length: int) -> Tensor:
    """LongRoPE (arXiv 2402.13753): one divisor per pair, from the list for short or for long texts."""
    divisors = rope.short_factor if length <= rope.original_context else rope.long_factor
    return _default(rope, length) / torch.tensor(divisors, dtype=torch.float32)


FREQUENCIES: dict[str, Callable[[Rope, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
