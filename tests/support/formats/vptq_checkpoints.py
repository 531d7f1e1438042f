"""VPTQ checkpoints of tiny random models, written tensor by tensor: no quantizer is involved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.formats.vptq_layers import Layer, Layout, make
from tests.support.models.tiny_checkpoints import make_model, write_tokenizer


@dataclass(frozen=True)
class Scheme:
    """What the layouts of a model's Linears share: the fields of `Layout` without sizes."""

    books: tuple[int, int, int]
    outlier: tuple[int, int, int] = (-1, -1, 0)
    groups: int = 1
    packed: bool = True
    perm: torch.dtype | None = torch.int16
    norm: bool = True

    def of(self, out: int, columns: int, dtype: torch.dtype) -> Layout:
        given = (self.outlier, self.groups, self.packed, self.perm, self.norm)
        return Layout(self.books, out, columns, *given, dtypes=(dtype,) * 4)


SCHEMES = {
    "v8-k65536-0": Scheme((8, 65536, 0)),
    "v16-k65536-65536": Scheme((16, 65536, 65536)),
    "v8-k256-16": Scheme((8, 256, 16)),
    "v12-k1024-64, padded": Scheme((12, 1024, 64)),
    "no permutation": Scheme((8, 512, 32), perm=None),
    "no norm": Scheme((8, 512, 0), norm=False),
    "groups and outliers": Scheme((16, 2048, 128), outlier=(4, 50, 8), groups=2),
    "unpacked": Scheme((8, 1000, 30), outlier=(6, 40, 4), packed=False, perm=torch.int64),
}


def write(
    folder: Path,
    schemes: Sequence[Scheme],
    dtype: torch.dtype = torch.float16,
    model_type: str = "llama",
    plain: str = "\n",
    **overrides: Any,
) -> dict[str, Layer]:
    """A checkpoint whose block Linears have `schemes` in turn, but for those whose path ends in `plain`.

    Returns the layers by the names of their modules.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(model_type, initializer_range=0.15, **overrides).to(dtype)
    model.config.dtype = dtype
    held = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    layers: dict[str, Layer] = {}
    for path, linear in model.named_modules():
        if not isinstance(linear, nn.Linear) or path == "lm_head" or path.endswith(plain):
            continue
        out, columns = linear.weight.shape
        scheme = schemes[len(layers) % len(schemes)]
        layers[path] = make(scheme.of(out, columns, dtype), seed=len(layers), spread=0.15)
        del held[f"{path}.weight"]
        held |= {path + suffix: tensor for suffix, tensor in layers[path].tensors.items()}
    described = {path: layer.config for path, layer in layers.items()}
    model.config.quantization_config = {"quant_method": "vptq", "config_for_layers": described}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    write_tokenizer(folder)
    return layers
