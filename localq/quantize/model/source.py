"""The full model, read one layer at a time and rotated (`fold.py`), and the checkpoint names of its tensors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Container, Iterator, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

from localq.engine.load import weights
from localq.engine.load.placing import TABLE
from localq.errors import bad_file, usage_error
from localq.files import format_facts
from localq.files.model_folder import ModelFiles
from localq.formats.checkpoint import Checkpoint, TensorInfo, info
from localq.formats.codebooks import vq2
from localq.models.decoder import Block, Decoder
from localq.models.experts import Mixture
from localq.models.layers import PlainLinear
from localq.models.unstacked_experts import unstack
from localq.quantize.model import expert_source, fold
from localq.quantize.model.linear_algebra import pieces
from localq.quantize.output.tensor_jobs import published_name
from localq.quantize.settings import QuantizedLayer
from localq.quantize.target import TargetFormat

STREAM = 1_000_003  # offset of the seed of the stream's rotation


class SourceModel:
    """A source model whose layers are read on request.

    rotated  the stream is rotated, and head and embedding are separate matrices
    model    its modules, on the meta device; the caller makes the tables of a pass
    """

    def __init__(
        self,
        files: ModelFiles,
        checkpoint: Checkpoint,
        architecture: ModuleType,
        device: torch.device,
        seed: int,
        *,
        rotated: bool = True,
    ) -> None:
        """Assign the checkpoint's tensors; rotated: layers as the code search takes them, else as stored."""
        with torch.device("meta"):
            self.model: Decoder = architecture.Model(architecture.Config.from_dict(files.config))
        if self.model.no_calibration:
            step = "Use --format nf4." if rotated else "Use --calibration none."
            raise usage_error(files.name, self.model.no_calibration, step)
        if self.model.config.experts and not rotated:
            raise usage_error(files.name, format_facts.NO_WEIGHING_OF_EXPERTS, "Use --calibration none.")
        self._assignment = weights.assign(checkpoint, self.model, architecture.rename, files.name)
        self._checkpoint, self._rename = checkpoint, architecture.rename
        self._open_experts(files)
        self._device, self._seed = device, seed
        self._folds = rotated
        self.rotated = rotated and fold.can_rotate_stream(self.model)
        self.layers = len(self.model.layers)
        self._linears = [_linears_of(self.meta_block(index)) for index in range(self.layers)]
        for index, names in enumerate(self._linears):
            for name in names if rotated else ():
                columns = fold.plain_linear(self.meta_block(index).get_submodule(name)).in_features
                if columns % vq2.BLOCK:
                    why = f"{name} has {columns} weights per row, but 2-bit formats require a multiple of {vq2.BLOCK}"
                    raise usage_error(files.name, why, "Use --format nf4.")

    def _open_experts(self, files: ModelFiles) -> None:
        """Turn stacked experts into separate linears."""
        mixtures = [module for module in self.model.modules() if isinstance(module, Mixture)]
        if any(each.experts.interleaved for each in mixtures):
            raise usage_error(files.name, format_facts.NO_SEARCH_OF_EXPERTS, "Use --format nf4.")
        model_type = str(files.config.get("model_type")) if mixtures else ""
        self._experts = (
            expert_source.expert_matrices(self._assignment, self._checkpoint, model_type) if mixtures else {}
        )
        self._model_type = model_type
        for block in self.model.layers:
            assert isinstance(block, Block)
            unstack(block)

    @functools.cached_property
    def _turn(self) -> Tensor | None:
        """The rotation of the stream; made when it is used, after its memory is counted."""
        if not self.rotated:
            return None
        kept = torch.float64 if self._device.type == "cpu" else torch.float32
        return fold.random_rotation(self.model.config.hidden, STREAM + self._seed).to(self._device, kept)

    @property
    def rotation_bytes(self) -> int:
        """Bytes of RAM of the rotation of the stream while it is made."""
        return 2 * 8 * self.model.config.hidden**2 if self.rotated else 0

    @property
    def origin(self) -> str:
        """The format of the source's weights, "" for unquantized ones."""
        return self._assignment.format or ""

    def meta_block(self, index: int) -> Block:
        """Return layer `index` on the meta device."""
        block = self.model.layers[index]
        assert isinstance(block, Block)
        return block

    def kinds(self) -> list[Block]:
        """Return the first layer of each kind (by what mixes tokens), on the meta device."""
        blocks = [self.meta_block(index) for index in reversed(range(self.layers))]
        return list({type(block.mixer()): block for block in blocks}.values())

    def block(self, index: int) -> Block:
        """Return layer `index`: plain linears, f32 on the device, rotated."""
        block = copy.deepcopy(self.meta_block(index)).to_empty(device=self._device).float()
        for name, _ in list(block.named_parameters()):
            owner, _, last = name.rpartition(".")
            tensor = self._read(f"layers.{index}.{name}")
            setattr(block.get_submodule(owner), last, nn.Parameter(tensor, requires_grad=False))
        for module in block.modules():
            if callable(finish := getattr(module, "finish", None)):  # norms that derive something from their weights
                finish()
        if self._folds:
            fold.fold_block(block, self._turn, self._seed * self.layers + index)
        return block

    def embeddings(self, windows: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yield the embedding rows f32 [T, hidden] of each window, on the CPU, rotated, before the family's scaling."""
        table = self._stored(TABLE)
        for ids in windows:
            yield self._rotated(self._wide(TABLE, table[torch.tensor(ids)]))

    def ending(self) -> tuple[Tensor, Tensor]:
        """Return the last norm's scale [hidden] and the head [vocab, hidden], tied or not; f32 on the CPU."""
        rows = self.end_rows({norm := self._key("norm.weight")})
        head = rows.get(self.head_name(), self._rows(TABLE))
        return torch.cat(list(rows[norm])), torch.cat(list(head))

    def end_rows(self, names: Container[str]) -> dict[str, Iterator[Tensor]]:
        """Return embedding, last norm and head among `names`, f32 on the CPU, some rows at a time."""
        tied, rotated = self.model.lm_head is None, self.rotated
        table, norm = self._key(TABLE), self._key("norm.weight")
        found: dict[str, Iterator[Tensor]] = {}
        if table in names:
            found[table] = self._rows(TABLE)
        if norm in names:
            weight, neutral = self._read("norm.weight"), self.model.norm.neutral
            before = weight + (1.0 - neutral)  # goes into a rotated head
            found[norm] = iter([(torch.full_like(weight, neutral) if rotated else weight).cpu()])
            if rotated or not tied:
                head = TABLE if tied else "lm_head.weight"
                found[self.head_name()] = self._rows(head, before if rotated else None)
        return found

    def end_names(self) -> tuple[list[str], list[str]]:
        """Return the names of `end_rows`: before the first layer (all of a tied model), and after the last."""
        table, norm = self._key(TABLE), self._key("norm.weight")
        names = list(self.end_shapes())
        return (names, []) if self.model.lm_head is None else ([table], [norm, self.head_name()])

    def tensor_names(self, layer: int | None, *, head: bool = False) -> list[str]:
        """Return the checkpoint tensors of a layer; for None, those read with the embedding, or with the `head`."""
        if layer is not None:
            targets = [f"layers.{layer}.{name}" for name, _ in self.meta_block(layer).named_parameters()]
        elif self.model.lm_head is None:
            targets = [] if head else [TABLE, "norm.weight"]
        else:
            targets = ["norm.weight", "lm_head.weight"] if head else [TABLE]
        return [key for target in targets for key in self._keys(target)]

    def head_name(self) -> str:
        """Return the checkpoint name of the head's weight."""
        return "lm_head.weight" if self.model.lm_head is None else self._key("lm_head.weight")

    # ---- names and sizes

    def root(self, index: int) -> str:
        """Return the prefix of a layer's modules in the checkpoint: "model.layers.3."."""
        name = self._linears[index][0]
        return self._prefix(f"layers.{index}.{name}").removesuffix(name)

    def other_names(self, index: int) -> dict[str, str]:
        """Return parameter -> checkpoint name for the unquantized ones of a block (norms, biases)."""
        quantized = {f"{name}.weight" for name in self._linears[index]}
        names = [name for name, _ in self.meta_block(index).named_parameters() if name not in quantized]
        return {name: published_name(self._key(f"layers.{index}.{name}"), self._model_type) for name in names}

    def linears(self, index: int) -> list[str]:
        """Return the names of a layer's quantized modules."""
        return self._linears[index]

    def prefix(self, index: int, name: str) -> str:
        """Return the output prefix of a layer's module, a linear or an expert."""
        path = f"layers.{index}.{name}"
        if path in self._experts:
            return self._experts[path].prefix
        if f"{path}.gate_proj" in self._experts:
            return self._experts[f"{path}.gate_proj"].prefix.rpartition(".")[0]
        return self.root(index) + name

    def others(self, block: Block, index: int) -> dict[str, Tensor]:
        """Return the unquantized parameters of a block by checkpoint name, on the CPU."""
        return {key: block.get_parameter(name).detach().cpu() for name, key in self.other_names(index).items()}

    def layout(
        self, index: int, targets: dict[str, TargetFormat], signed: set[str], homes: dict[str, str], dtype: torch.dtype
    ) -> dict[str, TensorInfo]:
        """Return the output tensors of a layer; targets, homes: by linear; signed: linears with rotated inputs."""
        block = self.meta_block(index)
        planned: dict[str, TensorInfo] = {}
        for name in self._linears[index]:
            linear = fold.plain_linear(block.get_submodule(name))
            parts = targets[name].layout(linear.out_features, linear.in_features, signs=name in signed)
            for suffix, (kind, shape) in parts.items():
                home = homes[name] if suffix.startswith(".codebook") else name
                planned[f"{self.prefix(index, home)}{suffix}"] = info(kind, shape)
        others = self.other_names(index).items()
        dtypes = {name: weights.dtype_of(self.model, f"layers.{index}.{name}", dtype) for name, _ in others}
        return planned | {key: info(dtypes[name], tuple(block.get_parameter(name).shape)) for name, key in others}

    def end_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of embedding, last norm and head by checkpoint name."""
        config = self.model.config
        table = (config.vocab_size, config.hidden)
        shapes = {self._key(TABLE): table, self._key("norm.weight"): (config.hidden,)}
        return shapes if self.model.lm_head is None and not self.rotated else {**shapes, self.head_name(): table}

    def unread(self) -> list[str]:
        """Return the checkpoint tensors outside the decoder, which a conversion copies."""
        used = set(self._assignment.dense.values())
        read = (*self._assignment.quantized.values(), *self._assignment.stacks.values())
        used |= {key for entry in read for key in (*entry.keys, *entry.shared)}
        redundant = {key for key in self._checkpoint.tensors if self._rename(key) in self.model.redundant}
        return sorted(set(self._checkpoint.tensors) - used - redundant)

    def weights(self) -> int:
        """Return the number of weights in all linears of the blocks."""
        return sum(
            fold.plain_linear(self.meta_block(index).get_submodule(name)).weight.numel()
            for index in range(self.layers)
            for name in self._linears[index]
        )

    def tensors(self, made: QuantizedLayer, block: Block, index: int, target: TargetFormat) -> dict[str, Tensor]:
        """Return the output tensors of a quantized layer."""
        written = self.others(block, index)
        written |= {self.other_names(index)[name]: value for name, value in made.others.items()}
        for name, packed in made.packed.items():
            written |= target.to_tensors(packed, self.prefix(index, name), self.prefix(index, made.homes[name]))
        return written

    # ---- inside

    def _key(self, target: str) -> str:
        """Return the checkpoint name of a parameter."""
        path = target.removesuffix(".weight")
        if path in self._assignment.quantized and path != target:
            return f"{self._assignment.quantized[path].prefix}.weight"
        return self._assignment.dense[target]

    def _keys(self, target: str) -> tuple[str, ...]:
        """Return all checkpoint tensors of a parameter."""
        path = target.removesuffix(".weight")
        if path in self._experts:
            return self._experts[path].keys
        if path in self._assignment.quantized and path != target:
            entry = self._assignment.quantized[path]
            return (*entry.keys, *entry.shared)
        return (self._assignment.dense[target],)

    def _prefix(self, path: str) -> str:
        return self._key(f"{path}.weight").removesuffix(".weight")

    def _rows(self, target: str, norm: Tensor | None = None) -> Iterator[Tensor]:
        """Yield rows of embedding or head, rotated, with the norm before a head folded in."""
        stored = self._stored(target)
        for rows in pieces(*stored.shape):
            part = self._wide(target, stored[rows])
            yield self._rotated(part if norm is None else part.mul_(norm))

    def _rotated(self, rows: Tensor) -> Tensor:
        return (rows if self._turn is None else fold.rotate_rows(rows, self._turn)).cpu()

    def _stored(self, target: str) -> Tensor:
        """Return a parameter as stored, on the CPU; a quantized one is dequantized."""
        path = target.removesuffix(".weight")
        if path in self._assignment.quantized and path != target:
            entry = self._assignment.quantized[path]
            packed = entry.module.from_checkpoint(self._checkpoint, entry.prefix)
            dense: Tensor = entry.module.dequantize(packed, torch.float32)
            return dense
        return self._checkpoint.read(self._assignment.dense[target])

    def _wide(self, target: str, stored: Tensor) -> Tensor:
        """Return a copy, f32 on the device, which converts faster than the host."""
        dense = stored.to(self._device).to(torch.float32, copy=True)
        if not bool(torch.isfinite(dense).all()):
            raise bad_file(
                self._keys(target)[0], "the weights contain NaN or infinity", "Check the weights with `localq verify`."
            )
        return dense

    def _read(self, target: str) -> Tensor:
        """Read a parameter, f32 on the device."""
        path = target.removesuffix(".weight")
        if path in self._experts:
            return self._wide(target, self._experts[path].read())
        if path in self._assignment.quantized and path != target:
            entry = self._assignment.quantized[path]
            packed = entry.module.from_checkpoint(self._checkpoint, entry.prefix)
            return self._wide(target, entry.module.dequantize(packed.to(self._device), torch.float32))
        return self._wide(target, self._stored(target))


def _linears_of(block: Block) -> list[str]:
    """Return the names of a block's quantized linears: all but a router."""
    found = block.named_modules()
    return [name for name, module in found if isinstance(module, nn.Linear) and not isinstance(module, PlainLinear)]
