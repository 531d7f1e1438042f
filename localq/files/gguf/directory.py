"""The tensors of a .gguf model under their Hugging Face names: where each is stored, and in which layout.

A stack of experts [E, out, in] has the matrix of an expert in one piece, so every matrix becomes a tensor of its own,
as in files with one matrix per expert. gpt-oss has its experts as wholes. Torch-free and numpy-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.extra_tensors import MORE_TOKENS
from localq.files.gguf.binary import BLOCKS, Container, RawTensor
from localq.files.gguf.facts import Facts
from localq.files.gguf.layout import AS_STORED, StoredLayout, layout_of
from localq.files.gguf.names import (
    alternating_part,
    block_number,
    expert_names,
    hugging_face_name,
    is_constant,
    is_copy,
    mtp_name,
    scaled_tensor,
)

F32 = 0  # ggml's number of the type
# Of Mamba-2, stored as columns, and by groups.
_FLAT = tuple(f".{home}.{part}" for home in ("mixer", "mamba") for part in ("A_log", "D", "norm.weight"))
_AGAIN, _OTHER = "Download the file again.", "Use a different GGUF file for this model."


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a .gguf model.

    gguf_name    of the stored tensor; of an expert's matrix, that of the stack
    type         ggml's number
    shape        that of Hugging Face; the last axis is the stored one, unless it is `transposed`
    offset       of its first byte in the file
    file         number in `GgufModel.files`
    layout       how stored values differ from those of Hugging Face
    parts        stored tensors [E, out, ...] whose entries alternate along the second axis: entry 2i + k of the whole
                 is entry i of parts[k]; the other fields are those of parts[0]. () for a tensor stored as such
    transposed   the stored tensor has the last two axes swapped
    scale        of a matrix: number of the file and offset of an f32 that multiplies its values; None without
    """

    gguf_name: str
    type: int
    shape: tuple[int, ...]
    offset: int
    file: int = 0
    layout: StoredLayout = AS_STORED
    parts: tuple[GgufTensor, ...] = ()
    transposed: bool = False
    scale: tuple[int, int] | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the stored values, of a tensor without `parts`."""
        return (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.transposed else self.shape


def row_bytes(type: int, columns: int) -> int:
    """Stored bytes of a row; for an unknown type, whose tensors are not read, any number."""
    values, size = BLOCKS.get(type, (32, 1))
    return columns // values * size


def rows_of(tensor: GgufTensor, first: int, count: int) -> GgufTensor:
    """Rows of a stored matrix, or entries [first : first + count] of the first axis of a stack, as a tensor.

    They are one piece of the file. Not for tensors with an order of their rows, or with `parts`.
    """
    _, *rest = tensor.stored_shape
    size = row_bytes(tensor.type, rest[-1])
    for axis in rest[:-1]:
        size *= axis
    return replace(tensor, shape=(count, *tensor.shape[1:]), offset=tensor.offset + first * size)


def read_directory(
    container: Container, family: str, config: dict[str, Any], predicting: int
) -> tuple[dict[str, GgufTensor], dict[str, list[str]], dict[str, GgufTensor]]:
    """Hugging Face name -> tensor; kind -> GGUF names of tensors that are left out (`extra_tensors`); and of these, as
    the first, those of a block that predicts the token after the next.

    predicting: blocks behind the last one that predict more tokens; of several, none is read. Raises LocalqError: exit
    8 for tensors that do not fit each other or the metadata, 1 for a tensor that the family does not have.
    """
    directory = _Directory(container, family, config)
    layers, extra = int(config["num_hidden_layers"]), []
    for name, raw in container.tensors.items():
        block = block_number(name)
        if is_constant(family, name):
            continue
        if block is not None and block >= layers + predicting:
            why = f"tensor {name!r} belongs to a block that does not exist (block_count is {layers + predicting})"
            raise bad_file(str(container.files[raw.file].path), why, _AGAIN)
        if block is not None and block >= layers:
            extra.append(name)
            continue
        if scaled_tensor(family, name) in container.tensors:
            continue  # read with the matrix
        for renamed, tensor in directory.places(name, raw):
            directory.add(renamed, tensor)
    mtp = _mtp_block(_Directory(container, family, config), extra, layers) if predicting == 1 else {}
    return directory.finish(), {MORE_TOKENS: extra} if extra else {}, mtp


def _mtp_block(directory: _Directory, names: list[str], layers: int) -> dict[str, GgufTensor]:
    """The tensors `names` of block `layers` under `mtp.`; none where one of them is not understood: it only drafts."""
    try:
        for name in (each for each in names if not is_copy(each)):
            for renamed, tensor in directory.places(name, directory.container.tensors[name]):
                directory.add(mtp_name(renamed, layers), tensor)
        return directory.finish()
    except LocalqError:
        return {}


class _Directory:
    """The tensors that were found so far."""

    def __init__(self, container: Container, family: str, config: dict[str, Any]) -> None:
        self.container, self._family, self._config = container, family, config
        self._architecture = Facts(container).architecture
        counts = (config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
        self._experts = int(next(filter(None, counts), 0))
        self._found: dict[str, GgufTensor] = {}
        self._parts: dict[str, dict[int, GgufTensor]] = {}
        self._wanted: dict[str, int] = {}

    def bad(self, tensor: GgufTensor, why: str) -> LocalqError:
        return bad_file(str(self.container.files[tensor.file].path), why, _AGAIN)

    def add(self, renamed: str, tensor: GgufTensor) -> None:
        if renamed in self._found:
            first, second = self._found[renamed].gguf_name, tensor.gguf_name
            raise self.bad(tensor, f"tensors {first!r} and {second!r} both map to {renamed}")
        self._found[renamed] = tensor

    def places(self, name: str, raw: RawTensor) -> Iterator[tuple[str, GgufTensor]]:
        """The Hugging Face names of a stored tensor; those whose rows alternate wait for `finish`."""
        stored = GgufTensor(name, raw.type, raw.shape, raw.offset, raw.file)
        if (alternating := alternating_part(self._family, name)) is not None:
            renamed, part, self._wanted[alternating[0]] = alternating
            self._check_experts(stored, 3 if name.endswith(".weight") else 2)
            self._parts.setdefault(renamed, {})[part] = stored
        elif names := expert_names(self._family, name):
            self._check_experts(stored, 3)
            yield from self._matrices(self._with_scale(stored, self._experts), names)
        else:
            renamed_or_none = hugging_face_name(self._family, name)
            if renamed_or_none is None:
                why = f"tensor {name!r} is not part of the {self._architecture} architecture"
                path = self.container.files[raw.file].path
                raise LocalqError(str(path), why, _OTHER, ExitCode.FAILURE)
            yield renamed_or_none, self._with_layout(self._with_scale(stored, 1), renamed_or_none)

    def finish(self) -> dict[str, GgufTensor]:
        """All tensors, with those whose rows alternate."""
        for renamed, parts in self._parts.items():
            if len(parts) < self._wanted[renamed]:
                (known,) = parts.values()
                raise self.bad(known, f"{renamed} is incomplete: only {known.gguf_name!r} is present")
            self.add(renamed, self._alternating([parts[number] for number in sorted(parts)]))
        return self._found

    def _check_experts(self, stack: GgufTensor, rank: int) -> None:
        if len(stack.shape) != rank or stack.shape[0] != self._experts:
            why = f"tensor {stack.gguf_name!r} has shape {stack.shape}, which is not a stack of {self._experts} experts"
            raise self.bad(stack, why)

    def _with_scale(self, tensor: GgufTensor, count: int) -> GgufTensor:
        """With the factors beside it, if there are any: `count` of them."""
        name = tensor.gguf_name.removesuffix(".weight") + ".scale"
        raw = self.container.tensors.get(name)
        if raw is None or scaled_tensor(self._family, name) != tensor.gguf_name:
            return tensor
        if raw.type != F32 or raw.shape != (count,):
            why = f"tensor {name!r} has shape {raw.shape} and type {raw.type}; expected ({count},) of type {F32} (F32)"
            raise self.bad(tensor, why)
        return replace(tensor, scale=(raw.file, raw.offset))

    def _matrices(self, stack: GgufTensor, names: tuple[str, ...]) -> Iterator[tuple[str, GgufTensor]]:
        """The matrices of a stack, each with its own offset."""
        experts, rows, columns = stack.shape
        if rows % len(names):
            raise self.bad(
                stack, f"tensor {stack.gguf_name!r} has {rows} rows, which is not a multiple of {len(names)}"
            )
        height = rows // len(names)
        size, offset = height * row_bytes(stack.type, columns), stack.offset
        shape, number, file = (height, columns), stack.type, stack.file
        for expert in range(experts):
            for name in names:
                scale = None if stack.scale is None else (stack.scale[0], stack.scale[1] + 4 * expert)
                yield name.format(expert), GgufTensor(stack.gguf_name, number, shape, offset, file, scale=scale)
                offset += size

    def _alternating(self, parts: list[GgufTensor]) -> GgufTensor:
        first, count = parts[0], len(parts)
        if any(part.shape != first.shape for part in parts):
            names = " and ".join(f"{part.gguf_name!r} {part.shape}" for part in parts)
            raise self.bad(first, f"tensors differ in shape: {names}")
        experts, rows, *columns = first.shape
        shape = (experts, *columns, count * rows)
        return replace(first, shape=shape, parts=tuple(parts) if count > 1 else (), transposed=bool(columns))

    def _with_layout(self, tensor: GgufTensor, renamed: str) -> GgufTensor:
        shape = tensor.shape
        if renamed.endswith((".conv1d.weight", ".conv.conv.weight")) and len(shape) == 2:
            shape = (shape[0], 1, shape[1])
        elif renamed.endswith(".shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, shape[0])
        elif renamed.endswith(_FLAT) and len(shape) == 2:
            shape = (shape[0] * shape[1],)
        try:
            found = layout_of(self._architecture, self._config, renamed, shape[0])
        except ValueError as error:
            raise self.bad(tensor, f"tensor {tensor.gguf_name!r}: {error}") from None
        for order, size, what in ((found.rows, shape[0], "rows"), (found.columns, shape[-1], "columns")):
            if order is not None and order.size != size:
                why = f"tensor {tensor.gguf_name!r} has {size} {what}, but the metadata specifies {order.size}"
                raise self.bad(tensor, why)
        return replace(tensor, shape=shape, layout=found)
