"""Stacks of experts in checkpoints with one matrix per expert and projection, as of qwen3_moe and mixtral.

"layers.0.mlp.experts.7.gate_proj.weight", "up_proj" and "down_proj", named by `rename`, are dense or in any format of
`formats.FORMATS`. In the model they are `experts.gate_up_proj` [E, 2 * width, hidden], for each expert the rows of gate
before those of up, or `experts.up_proj` of experts without gates, and `experts.down_proj` [E, hidden, width]. A stack
is filled expert by expert, so that the host holds one matrix beside it. The methods are those of `stacks.ExpertStack`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq.engine.load.shared import SharedTensors
from localq.errors import bad_file
from localq.formats import FORMATS, keys, placed_bytes, shared_names
from localq.formats.checkpoint import Checkpoint
from localq.formats.linear import SlabLinear
from localq.models.decoder import Decoder
from localq.models.experts import Experts, UngatedExperts

DENSE_DTYPES = ("float32", "bfloat16", "float16", "float64")
# Formats whose experts stay Linears of their own on a GPU; those that `join` are rows of one matrix.
LINEARS = tuple(format for format, module in FORMATS.items() if not hasattr(module, "join"))
PARTS = {**Experts.parts, **UngatedExperts.parts}  # parameter -> its parts, by rows
_PIECE = re.compile(r"(.+\.experts)\.(0|[1-9]\d{0,3})\.(gate_proj|up_proj|down_proj)\.(.+)")
_AGAIN = "Download the model again; if the error persists, the published files are inconsistent."


@dataclass(frozen=True)
class ExpertPiece:
    """One matrix in the checkpoint: its prefix, its tensors' names, and the format, None for a dense one."""

    prefix: str
    keys: tuple[str, ...]
    format: str | None

    @property
    def module(self) -> ModuleType:
        """The module of its format; not for a dense matrix."""
        assert self.format is not None
        return FORMATS[self.format]

    def shape(self, checkpoint: Checkpoint) -> tuple[int, int]:
        """[out, in]; raises LocalqError (exit 8) where its tensors do not fit together."""
        if self.format is not None:
            shape: tuple[int, int] = self.module.stored_shape(checkpoint, self.prefix)
            return shape
        info = checkpoint.tensors[self.keys[0]]
        if len(info.shape) != 2 or not all(info.shape):
            raise bad_file(self.keys[0], f"not a matrix (shape: {list(info.shape)})", _AGAIN)
        if info.dtype not in DENSE_DTYPES:
            raise bad_file(self.keys[0], f"unsupported dtype {info.dtype}")
        return info.shape[0], info.shape[1]

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        """Read [out, in], dequantized; a dense matrix as stored."""
        if self.format is None:
            key = self.keys[0]
            return checkpoint.read_as(key, dtype) if checkpoint.converts else checkpoint.read(key)
        weight: Tensor = self.module.dequantize(self.module.from_checkpoint(checkpoint, self.prefix), dtype)
        return weight


@dataclass(eq=False)
class ExpertPieces:
    """A stack by its pieces, of one checkpoint: (expert, part) -> piece.

    name    of the parameter
    keys    the checkpoint's tensors that are of it alone; `shared` those that others may read too
    """

    name: str
    pieces: Mapping[tuple[int, str], ExpertPiece]
    keys: tuple[str, ...]
    shared: tuple[str, ...]
    _shape: tuple[int, int, int] | None = field(default=None, init=False)  # asked for often, of thousands of tensors

    @property
    def parts(self) -> tuple[str, ...]:
        """The projections that the rows of an expert consist of, in order."""
        return PARTS[self.name.rpartition(".")[2]]

    @property
    def format(self) -> str | None:
        """The format of all matrices; None where they differ or are dense: then all are 16 bit on a GPU."""
        formats = {piece.format for piece in self.pieces.values()}
        return formats.pop() if len(formats) == 1 else None

    def stored_bytes(self, checkpoint: Checkpoint) -> int:
        """Bytes in the checkpoint."""
        dense = sum(checkpoint.tensors[piece.keys[0]].nbytes for piece in self.pieces.values() if piece.format is None)
        packed = [piece for piece in self.pieces.values() if piece.format is not None]
        return dense + sum(int(each.module.stored_bytes(checkpoint.tensors, each.prefix)) for each in packed)

    def shape(self, checkpoint: Checkpoint) -> tuple[int, int, int]:
        """Return [experts, out, in]; raises LocalqError (exit 8) for missing or mis-shaped parts."""
        if self._shape is None:
            self._shape = self._checked(checkpoint)
        return self._shape

    def _checked(self, checkpoint: Checkpoint) -> tuple[int, int, int]:
        experts = 1 + max(expert for expert, _ in self.pieces)
        if len(self.pieces) != experts * len(self.parts):
            wanted = ((expert, part) for expert in range(experts) for part in self.parts)
            expert, part = next(each for each in wanted if each not in self.pieces)
            raise bad_file(self.name, f"the checkpoint is missing {part} of expert {expert}", _AGAIN)
        first = {part: self.pieces[0, part].shape(checkpoint) for part in self.parts}
        for (_, part), piece in self.pieces.items():
            if (found := piece.shape(checkpoint)) != first[part]:
                why = f"{piece.prefix!r} has shape {list(found)}, but expert 0 has shape {list(first[part])}"
                raise bad_file(self.name, why, _AGAIN)
        (columns, *others) = {columns for _, columns in first.values()}
        if others or len({rows for rows, _ in first.values()}) > 1:
            raise bad_file(
                self.name, f"the gate and up matrices differ in shape: {', '.join(map(str, first.values()))}", _AGAIN
            )
        return experts, sum(rows for rows, _ in first.values()), columns

    def rows(self, checkpoint: Checkpoint) -> Iterator[tuple[slice, ExpertPiece]]:
        """Yield every piece with its rows in the tall matrix [experts * out, in]."""
        experts, out, _ = self.shape(checkpoint)
        height = out // len(self.parts)
        for number, key in enumerate((expert, part) for expert in range(experts) for part in self.parts):
            yield slice(number * height, (number + 1) * height), self.pieces[key]

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        """Read [experts, out, in], dequantized."""
        experts, out, columns = self.shape(checkpoint)
        weight = torch.empty(experts * out, columns, dtype=dtype)
        for rows, piece in self.rows(checkpoint):
            weight[rows] = piece.read(checkpoint, dtype)
        return weight.view(experts, out, columns)

    def placed_bytes(self, checkpoint: Checkpoint) -> list[int]:
        """Bytes on a GPU of each tensor of `tall`, or of `linears` without what they share (`shared`)."""
        experts, out, columns = self.shape(checkpoint)
        if self.format in LINEARS:
            own = (placed_bytes(each.module, checkpoint, each.prefix) for each in self.pieces.values())
            return [int(size) for sizes in own for size in sizes]
        assert self.format is not None
        sizes: list[int] = FORMATS[self.format].joined_bytes(experts * out * columns)
        return sizes

    def tall(self, checkpoint: Checkpoint) -> Any:
        """Return all experts as one matrix [experts * out, in] of the format, on the CPU: its `Packed`."""
        experts, out, columns = self.shape(checkpoint)
        assert self.format is not None
        module = FORMATS[self.format]
        parts = ((rows, module.from_checkpoint(checkpoint, piece.prefix)) for rows, piece in self.rows(checkpoint))
        return module.join((experts * out, columns), parts)

    def linears(
        self, held: SharedTensors, place: Callable[[Tensor], Tensor], device: torch.device
    ) -> list[list[SlabLinear]]:
        """Return [experts][parts] Linears on `device`, tiled; `place` copies tensors, shared ones once.

        One matrix at a time is on the host.
        """
        experts, *_ = self.shape(held.checkpoint)
        return [
            [_place_linear(self.pieces[at, part], held, place, device) for part in self.parts] for at in range(experts)
        ]


def find(checkpoint: Checkpoint, rename: Callable[[str], str | None], model: Decoder) -> dict[str, ExpertPieces]:
    """Parameter name -> its pieces, for experts whose rows of gate come before those of up.

    `rename` as of `weights.assign`. Raises LocalqError (exit 8) where two matrices would be the same piece.
    """
    prefixes = _prefixes(checkpoint, rename, model)
    found: dict[str, dict[tuple[int, str], ExpertPiece]] = {}
    for (path, expert, part), prefix in prefixes.items():
        piece = _piece(checkpoint.tensors, prefix)
        leaf = next(leaf for leaf, parts in _experts(model, path).parts.items() if part in parts)
        if piece is not None:
            found.setdefault(f"{path}.{leaf}", {})[expert, part] = piece
    return {name: _join(checkpoint, name, pieces) for name, pieces in found.items()}


def _experts(model: Decoder, path: str) -> Experts:
    found = model.get_submodule(path)
    assert isinstance(found, Experts)
    return found


def _prefixes(
    checkpoint: Checkpoint, rename: Callable[[str], str | None], model: Decoder
) -> dict[tuple[str, int, str], str]:
    """Return (path of the experts, number, part) -> prefix of its tensors."""
    paths = {path for path, module in model.named_modules() if isinstance(module, Experts) and not module.interleaved}
    prefixes: dict[tuple[str, int, str], str] = {}
    for key in checkpoint.tensors:
        match = _PIECE.fullmatch(rename(key) or "") if ".experts." in key else None
        if match is None or match[1] not in paths:
            continue
        prefix = key.removesuffix(f".{match[4]}")
        if prefixes.setdefault((match[1], int(match[2]), match[3]), prefix) != prefix:
            raise bad_file(key[:80], f"two matrices map to {match[3]} of expert {match[2]}", _AGAIN)
    return prefixes


def _piece(tensors: Mapping[str, Any], prefix: str) -> ExpertPiece | None:
    """Return the piece, None without a matrix: `weights.assign` then reports its tensors."""
    for format, module in FORMATS.items():
        if module.is_quantized(tensors, prefix):
            return ExpertPiece(prefix, keys(module, tensors, prefix), format)
    return ExpertPiece(prefix, (f"{prefix}.weight",), None) if f"{prefix}.weight" in tensors else None


def _place_linear(
    piece: ExpertPiece, held: SharedTensors, place: Callable[[Tensor], Tensor], device: torch.device
) -> SlabLinear:
    packed = piece.module.from_checkpoint(held.checkpoint, piece.prefix)
    linear: SlabLinear = piece.module.Linear(packed.placed(held.once(place), device), None)
    return linear.tile_()


def _join(checkpoint: Checkpoint, name: str, pieces: dict[tuple[int, str], ExpertPiece]) -> ExpertPieces:
    shared: dict[str, None] = {}
    for piece in pieces.values():
        if piece.format is not None:
            shared |= dict.fromkeys(shared_names(piece.module, checkpoint.tensors, piece.prefix))
    return ExpertPieces(name, pieces, tuple(key for piece in pieces.values() for key in piece.keys), tuple(shared))
