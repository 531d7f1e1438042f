"""A matrix as a matrix-vector product reads it: the base of the operands of all formats. Torch only, no compiled part.

A quantized matrix has three forms: the tensors of a checkpoint (`Packed` of its format), a `Linear` that holds them in
the order of the kernels, and the operand that `Linear.operand()` gives, which a launch takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Operand(ABC):
    """A matrix [out_features, in_features], and its bias [out_features] or None.

    A format's operand has its tensors as fields, and says what the decode step needs to know: which launch multiplies
    it, what that reads, and with which others it shares a launch.
    """

    bias: Tensor | None = field(default=None, kw_only=True)
    shared: ClassVar[tuple[str, ...]] = ()  # small tables, of which all operands of a launch have the same

    if TYPE_CHECKING:  # fields of some operands, properties of others

        @property
        @abstractmethod
        def out_features(self) -> int:
            """Rows."""

        @property
        @abstractmethod
        def in_features(self) -> int:
            """Columns."""

        @property
        @abstractmethod
        def nbytes(self) -> int:
            """Bytes that a product reads of it, without the bias."""

    @property
    @abstractmethod
    def launch(self) -> Callable[..., Tensor]:
        """launch(x, operands, *, norm, residual, activation, out): the product of up to `gemv.ROWS` rows of x with
        operands of one `key`."""
        ...

    @property
    @abstractmethod
    def key(self) -> tuple[object, ...]:
        """Equal for operands of this class that one launch takes together."""
        ...

    @abstractmethod
    def readable(self, dtype: torch.dtype = torch.float16) -> bool:
        """Return whether `launch` reads it beside x of `dtype`, on its device."""
        ...

    @property
    def around_x(self) -> Tensor | None:
        """Tensor that a launch reads once for all its operands, to prepare x."""
        return None

    def bytes(self) -> int:
        """Bytes that a product reads of it, the bias included."""
        return self.nbytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the sectors of L2 that a product gathers codewords from; 0 where it streams."""
        return 0

    def copy(self) -> Self:
        """Equal tensors at addresses of their own, but for `shared` ones: for measuring with a cold cache."""
        held = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: tensor.clone() for name, tensor in held.items()
                                if isinstance(tensor, Tensor) and name not in self.shared})  # fmt: skip

    def halves(self) -> tuple[Self, Self] | None:
        """The first and the second half of the rows, as views; None where the format cannot be cut there."""
        return None

    def sharing(self, first: Self) -> Self:
        """The same with the tables of `first` wherever its own are equal. Waits for the device: for load time."""
        return self


def share_tables(operands: Sequence[Operand]) -> list[Operand]:
    """The same, with the tables of the first wherever theirs are equal: one launch has one of each, and one x.

    Compares on the device and waits for it: for load time.
    """
    first = operands[0]
    return [each.sharing(first) if type(each) is type(first) else each for each in operands]


def equal(mine: Tensor | None, theirs: Tensor | None) -> bool:
    """Return whether both are there and hold the same."""
    return mine is not None and theirs is not None and torch.equal(mine, theirs)


def address(tensor: Tensor | None) -> int | None:
    """Return the address of `tensor`; None for None."""
    return None if tensor is None else tensor.data_ptr()
