"""Assign checkpoint tensors to parameters, and fill them in one by one.

`assign` checks names and shapes before a byte is read: a missing, unexpected or mis-shaped tensor is an error that
names it. `fill` then streams, so that host memory holds one tensor at a time. Here models meet formats: a quantized
Linear of the checkpoint is replaced by the format's own Linear on a GPU, and dequantized into the plain one on the CPU,
where that is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from localq.engine.load import expert_pieces, heads, stacks
from localq.engine.load.expert_pieces import DENSE_DTYPES
from localq.engine.load.placing import HEAD, INPUT_TABLE, LARGE, TABLE, Destinations
from localq.engine.load.shared import SharedTensors
from localq.errors import LocalqError, bad_file
from localq.formats import FORMATS, gguf, keys, owner, placed_bytes, shared_names
from localq.formats.checkpoint import Checkpoint
from localq.formats.linear import SlabLinear
from localq.models.decoder import Decoder
from localq.models.layers import PlainLinear
from localq.planner.placement import STORED

HEAD_FORMATS = ("nf4", "gguf")  # a head in another format is dequantized: `placement` plans for no other
STORED_HEADS = (gguf,)  # formats of which `placement` plans a head as it is stored
_AGAIN = "Download the model again; if the error persists, the published files are inconsistent."
# A download is not the cause: the files are as their maker wrote them.
_OTHER = "Without them, the output would be incorrect. Use a different repository for this model."


@dataclass(frozen=True)
class QuantizedSource:
    """The source of a quantized Linear: its format's module, its checkpoint prefix, and its tensors' names.

    shared   names of tensors that other Linears may read too
    """

    format: str
    module: ModuleType
    prefix: str
    keys: tuple[str, ...]
    shared: tuple[str, ...] = ()


@dataclass
class Assignment:
    """Assignment of checkpoint tensors to a model.

    dense      parameter name -> checkpoint key
    quantized  path of the Linear -> its source
    stacks     parameter name -> its experts, where the checkpoint stores them quantized or one by one
    head       the output head as stored, where a GPU keeps it in its format (`placement.STORED`): also that of a tied
               model, whose files have the table in such a format
    head_bytes its bytes there
    """

    dense: dict[str, str] = field(default_factory=dict)
    quantized: dict[str, QuantizedSource] = field(default_factory=dict)
    stacks: dict[str, stacks.AnyStack] = field(default_factory=dict)
    head: QuantizedSource | None = None
    head_bytes: int = 0

    @property
    def format(self) -> str | None:
        """The quantized format in use, the first of several; None without one."""
        return next(iter(self.formats), None)

    @property
    def formats(self) -> dict[str, None]:
        """All of them, in order."""
        found: tuple[QuantizedSource | stacks.AnyStack, ...] = (*self.quantized.values(), *self.stacks.values())
        return dict.fromkeys(each.format for each in found if each.format)


def assign(checkpoint: Checkpoint, model: Decoder, rename: Callable[[str], str | None], name: str) -> Assignment:
    """Match `checkpoint` with the parameters of `model` (on the meta device), by name and shape.

    rename: checkpoint key -> parameter name, None for tensors of other parts; name: the model's, for errors. Raises
    LocalqError (exit 8) unless every parameter has exactly one source.
    """
    whole, joined = stacks.find(checkpoint, rename), expert_pieces.find(checkpoint, rename, model)
    if twice := whole.keys() & joined.keys():
        raise bad_file(name, f"{min(twice)!r} is stored both stacked and per expert", _AGAIN)
    assignment = Assignment(stacks={**whole, **joined})
    owned = {key for stack in assignment.stacks.values() for key in (*stack.keys, *stack.shared)}
    parameters = {parameter for parameter, _ in model.named_parameters()}
    for key in checkpoint.tensors:
        entry = None if key in owned else _quantized_source(checkpoint, key)
        if entry is None:
            continue
        owned.update(entry.keys, entry.shared)
        target = rename(f"{entry.prefix}.weight")
        if target == f"{HEAD}.weight" and entry.module in STORED_HEADS:
            assignment.head = entry
            assignment.head_bytes = sum(placed_bytes(entry.module, checkpoint, entry.prefix))
        if target is not None and target not in model.redundant:
            assignment.quantized[target.removesuffix(".weight")] = entry
    for key in checkpoint.tensors:
        target = None if key in owned else rename(key)
        if target is None or target in model.redundant or _is_idle(checkpoint, key, target, parameters):
            continue
        taken = target in assignment.dense or target in assignment.stacks
        if taken or target.removesuffix(".weight") in assignment.quantized:
            raise bad_file(name, f"{key[:80]!r} and another tensor both map to {target[:80]!r}", _AGAIN)
        assignment.dense[target] = key
    if model.lm_head is None and TABLE not in assignment.dense:  # saved under the name of the head alone
        of_head = [key for key in checkpoint.tensors if key not in owned and rename(key) == f"{HEAD}.weight"]
        if of_head:
            assignment.dense[TABLE] = of_head[0]
    _check(assignment, checkpoint, model, name)
    return assignment


def _quantized_source(checkpoint: Checkpoint, key: str) -> QuantizedSource | None:
    found = owner(checkpoint.tensors, key)
    if found is None:
        return None
    format, prefix = found
    module = FORMATS[format]
    return QuantizedSource(
        format,
        module,
        prefix,
        keys(module, checkpoint.tensors, prefix),
        shared_names(module, checkpoint.tensors, prefix),
    )


def _is_idle(checkpoint: Checkpoint, key: str, target: str, parameters: Collection[str]) -> bool:
    """True for a bias of zeros that some formats store for a Linear without bias; any other bias is unknown."""
    prefix = key.removesuffix(".bias")
    if prefix == key or target in parameters:
        return False
    formats = (module for module in FORMATS.values() if getattr(module, "idle_biases", False))
    of_one = any(module.is_quantized(checkpoint.tensors, prefix) for module in formats)
    return of_one and not bool(checkpoint.read(key).count_nonzero())


def _check(assignment: Assignment, checkpoint: Checkpoint, model: Decoder, name: str) -> None:
    wanted = {parameter: tuple(tensor.shape) for parameter, tensor in model.named_parameters()}
    sources = {f"{path}.weight" for path in assignment.quantized} | {*assignment.dense, *assignment.stacks}
    if missing := [parameter for parameter in wanted if parameter not in sources]:
        if missing == [f"{HEAD}.weight"]:
            why = "config.json specifies a separate output head, but the weight files do not contain one"
            raise bad_file(
                name,
                why,
                'If the output head shares the embedding weights, set "tie_word_embeddings" to true in config.json.',
            )
        raise bad_file(name, f"{len(missing)} weights are missing (first: {missing[0]!r})", _AGAIN)
    if unknown := [source for source in sorted(sources) if source not in wanted]:
        why = f"{len(unknown)} tensors do not belong to this architecture (first: {unknown[0][:80]!r})"
        raise bad_file(name, why, _OTHER)
    stacks.check(assignment.stacks, checkpoint, wanted, name)
    for target, key in assignment.dense.items():
        info, shape = checkpoint.tensors[key], wanted[target]
        if target in model.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if info.shape != shape:
            raise bad_file(name, f"{key!r} has shape {list(info.shape)}; expected {list(shape)}", _AGAIN)
        if info.dtype not in DENSE_DTYPES:
            raise bad_file(name, f"{key!r} has unsupported dtype {info.dtype}")
    for path, entry in assignment.quantized.items():
        if not isinstance(model.get_submodule(path), nn.Linear):
            raise bad_file(name, f"{path!r} is quantized but is not a linear layer", _AGAIN)
        found = entry.module.stored_shape(checkpoint, entry.prefix)
        if found != wanted[f"{path}.weight"]:
            why = f"{entry.prefix!r} has shape {list(found)}, not {list(wanted[f'{path}.weight'])}"
            raise bad_file(name, why, _AGAIN)


def dtype_of(model: Decoder, target: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the parameter `target` in a model of `dtype`."""
    return torch.float32 if target in model.in_f32 else dtype


def block_sizes(
    assignment: Assignment, checkpoint: Checkpoint, model: Decoder, dtype: torch.dtype, packed: bool
) -> list[int]:
    """Return the device bytes of every weight but embedding and head; packed: quantized ones stay quantized."""
    shapes = dict(model.named_parameters())
    kept = {target: stack for target, stack in assignment.stacks.items() if packed and stacks.is_packed(stack)}
    dense = [target for target in (*assignment.dense, *assignment.stacks) if target not in (*LARGE, *kept)]
    sizes = [shapes[target].numel() * dtype_of(model, target, dtype).itemsize for target in dense]
    sizes += [size for stack in kept.values() for size in stack.placed_bytes(checkpoint)]
    for path, entry in assignment.quantized.items():
        if path == HEAD:
            continue
        if packed and not _is_plain(model, path):
            sizes += placed_bytes(entry.module, checkpoint, entry.prefix)
        else:
            sizes.append(shapes[f"{path}.weight"].numel() * dtype.itemsize)
    if packed:
        blocks = [entry for path, entry in assignment.quantized.items() if path != HEAD and not _is_plain(model, path)]
        held = (*blocks, *kept.values())
        sizes += [checkpoint.tensors[key].nbytes for key in {key: None for entry in held for key in entry.shared}]
    return sizes


def weight_bytes(model: Decoder) -> dict[str, int]:
    """Return the device bytes of "weights" of the blocks as stored, "embedding", and a separate "head"."""
    device = model.norm.weight.device
    tables = [each for name, each in model.named_parameters() if name in (TABLE, INPUT_TABLE)]
    head = 0 if model.lm_head is None else _bytes(model.lm_head)
    return {
        "weights": _bytes(model) - sum(each.nbytes for each in tables) - head - padding_bytes(model),
        "embedding": sum(each.nbytes for each in tables if each.device == device),
        "head": head,
    }


def padding_bytes(model: Decoder) -> int:
    """Return the device bytes that tiles have in addition to the stored tensors; the plan counts them as tables."""
    return sum(module.padding_bytes for module in model.modules() if isinstance(module, SlabLinear))


def _bytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def fill(
    model: Decoder,
    assignment: Assignment,
    checkpoint: Checkpoint,
    places: Destinations,
    on_progress: Callable[[int, int], None],
) -> list[str]:
    """Read every tensor into `model`; on_progress(bytes read, in total) after each.

    A GPU never holds more than the plan: quantizing and tiling work on some rows at a time, and embedding and head come
    first. Returns the names of tensors with NaN or infinity.
    """
    sources, stacks_ = dict(assignment.dense), assignment.stacks
    linears, made_head = _head_sources(assignment, sources, checkpoint, places)
    sizes = {key: checkpoint.tensors[key].nbytes for key in checkpoint.tensors}
    total = sum(sizes[key] for key in sources.values()) + (0 if made_head is None else made_head.nbytes)
    total += sum(sizes[key] for entry in linears.values() for key in entry.keys)
    total += sum(sizes[key] for stack in stacks_.values() for key in stack.keys)
    shared = SharedTensors(
        checkpoint, (key for entry in (*linears.values(), *stacks_.values()) for key in entry.shared)
    )
    done = 0
    non_finite: list[str] = []
    if made_head is not None:
        _make_head(model, checkpoint, made_head, places, non_finite)
        done += made_head.nbytes
        on_progress(done, total)
    for target, key in sorted(sources.items(), key=lambda each: each[0] not in LARGE):
        tensor = _dense(checkpoint, key, target, model, places)
        _note_non_finite(tensor, key, non_finite)
        _put(model, target, tensor)
        done += sizes[key]
        on_progress(done, total)
    for path, entry in linears.items():
        _put_quantized(model, path, entry, shared, places)
        done += sum(sizes[key] for key in entry.keys)
        on_progress(done, total)
    for target, stack in stacks_.items():
        if places.packed and stacks.is_packed(stack):
            _replace(model, target, stacks.load_stack(stack, shared, places.block, places.device))
        elif isinstance(stack, stacks.JoinedStack):
            tensor = places.empty_block(stack.shape(checkpoint))
            stack.read_into(tensor, checkpoint)
            _note_non_finite(tensor, stack.name, non_finite)
            _put(model, target, tensor)
        else:
            tensor = stack.read(checkpoint, places.dtype)
            _note_non_finite(tensor, stack.name, non_finite)
            _put(model, target, places.block(tensor) if places.packed else tensor)
        done += sum(sizes[key] for key in stack.keys)
        on_progress(done, total)
    if empty := [target for target, tensor in model.named_parameters() if tensor.is_meta]:
        raise LocalqError("engine", f"the weight {empty[0]!r} was never loaded", "Report this as a bug.")
    return list(dict.fromkeys(non_finite))


class _HeadSource(NamedTuple):
    """The weights from which a head in fewer bits is made: a tensor, or a stored matrix of another format."""

    key: str
    nbytes: int
    stored: QuantizedSource | None = None

    def read(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Tensor:
        """[vocab, hidden] on the CPU."""
        if self.stored is None:
            return checkpoint.read(self.key).to(dtype)
        weight: Tensor = self.stored.module.dequantize(
            self.stored.module.from_checkpoint(checkpoint, self.stored.prefix), dtype
        )
        return weight


def _head_sources(
    assignment: Assignment, sources: dict[str, str], checkpoint: Checkpoint, places: Destinations
) -> tuple[dict[str, QuantizedSource], _HeadSource | None]:
    """Quantized Linears with the head as it is placed, and the source of a head in fewer bits, taken from `sources`."""
    linears, stored, head = assignment.quantized, assignment.head, places.placement.head
    if head == STORED and stored is not None:
        return {**linears, HEAD: stored}, None  # of a tied model too
    if head == "16" or (HEAD in linears and stored is None):
        return linears, None
    if HEAD in linears and stored is not None:
        others = {path: entry for path, entry in linears.items() if path != HEAD}
        return others, _HeadSource(stored.prefix, assignment.head_bytes, stored)
    key = sources.pop(f"{HEAD}.weight", sources[TABLE])
    return linears, _HeadSource(key, checkpoint.tensors[key].nbytes)


def _dense(checkpoint: Checkpoint, key: str, target: str, model: Decoder, places: Destinations) -> Tensor:
    """Read a dense weight into its place."""
    dtype = dtype_of(model, target, places.dtype)
    if target in model.transposed:
        return places.dense(target, checkpoint.read(key).mT, dtype)
    if not places.packed:
        return checkpoint.read_as(key, dtype)
    stored = checkpoint.read_as(key, dtype) if checkpoint.converts else checkpoint.read(key)
    return places.dense(target, stored, dtype)


def _make_head(
    model: Decoder, checkpoint: Checkpoint, source: _HeadSource, places: Destinations, non_finite: list[str]
) -> None:
    """Set a head in fewer bits than `source`; the source weights stay on the host."""
    weight = source.read(checkpoint, places.dtype)
    _note_non_finite(weight, source.key, non_finite)
    try:
        model.lm_head = heads.quantize_head(weight, places.placement.head, places.dtype, places.device)
    except LocalqError as error:
        raise bad_file(source.key, error.why, "Check the weights with `localq verify`.") from error


def _note_non_finite(tensor: Tensor, key: str, names: list[str]) -> None:
    """Append `key` to `names` where the tensor has NaN or infinity; without a mask of its size."""
    low, high = torch.aminmax(tensor)
    if not torch.isfinite(low) & torch.isfinite(high):
        names.append(key)


def _put(model: nn.Module, target: str, tensor: Tensor) -> None:
    _replace(model, target, nn.Parameter(tensor, False))


def _replace(model: nn.Module, target: str, by: nn.Parameter | nn.Module) -> None:
    path, _, leaf = target.rpartition(".")
    parent = model.get_submodule(path)
    delattr(parent, leaf)  # a module cannot be assigned where a parameter is
    setattr(parent, leaf, by)


def _is_plain(model: nn.Module, path: str) -> bool:
    """True for a router, which computes in f32, and its like: bitsandbytes quantizes them by default."""
    return isinstance(model.get_submodule(path), PlainLinear)


def _put_quantized(
    model: nn.Module, path: str, entry: QuantizedSource, shared: SharedTensors, places: Destinations
) -> None:
    """Set a quantized Linear; its bias, if any, is dense and already set."""
    plain = getattr(model, HEAD) if path == HEAD else model.get_submodule(path)
    assert plain is None or isinstance(plain, nn.Linear)  # checked by `assign`; None: the head of a tied model
    packed = entry.module.from_checkpoint(shared.checkpoint, entry.prefix)
    is_wide = entry.format not in HEAD_FORMATS or (entry.module in STORED_HEADS and places.placement.head == "16")
    if not places.packed or (path == HEAD and is_wide):
        _put(model, f"{path}.weight", entry.module.dequantize(packed, places.dtype).to(places.device))
        return
    if isinstance(plain, PlainLinear):
        _put(model, f"{path}.weight", places.block(entry.module.dequantize(packed, places.dtype)))
        return
    bias = None if plain is None or plain.bias is None else plain.bias.data
    placed = packed.placed(places.alone if path == HEAD else shared.once(places.block), places.device)
    linear = entry.module.Linear(placed, bias)
    linear.tile_()
    if path == HEAD:
        model.lm_head = linear
    else:
        _replace(model, path, linear)
