"""Matrices of MXFP4, and the experts of mixtures, on random numbers: named as they are published.

Where gate and up alternate (gpt-oss), a layer's experts are stacks in MXFP4, whatever the rest is in; else one matrix
each, as `random_formats.py` makes them in every format but VPTQ, which would have a large codebook for each. The rest
of a mixture in MXFP4 is in 16 bit. Codes are uniform, and a row has about unit gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor

from localq.bench.synthetic.tensors import Part, Recipe, codes, part
from localq.engine.load.expert_pieces import PARTS
from localq.formats import mxfp4
from localq.formats.mxfp4 import experts as mxfp4_experts
from localq.formats.mxfp4.codec import BIAS
from localq.models.decoder import Decoder
from localq.models.experts import Experts

TAKEN = ("nf4", "mxfp4", "vq2", "aqlm", "awq", "gptq", "bcq", "squeezellm")
Suffixed = dict[str, Part]  # suffix of a matrix's or a stack's tensor -> how it is made


def stacks(model: Decoder, format: str) -> dict[str, tuple[int, int, int]]:
    """The experts that `format` takes: name of the parameter -> [E, out, in]."""
    found = {}
    for path, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, Experts) and format in (("mxfp4", "nf4") if module.interleaved else TAKEN):
            found[f"{path}.gate_up_proj"] = module.count, 2 * module.width, model.config.hidden
            found[f"{path}.down_proj"] = module.count, model.config.hidden, module.width
    return found


def parts(model: Decoder, format: str, make: Callable[[int, int], Suffixed]) -> dict[str, Suffixed]:
    """What `stacks` are in a checkpoint: name in the model -> its tensors. `make` makes one matrix [out, in]."""
    made = {}
    for name, (experts, out, columns) in stacks(model, format).items():
        path, _, leaf = name.rpartition(".")
        if model.get_submodule(path).interleaved:
            made[name] = _stack(experts, out, columns)
            continue
        rows = out // len(PARTS[leaf])
        made |= {f"{path}.{expert}.{piece}": make(rows, columns) for expert in range(experts) for piece in PARTS[leaf]}
    return made


def linear(out: int, columns: int) -> Suffixed:
    """A Linear in MXFP4."""
    made = zip(mxfp4.layout(out, columns).items(), (codes, _powers(columns)), strict=True)
    return {suffix: part(*described, make) for (suffix, described), make in made}


def _stack(experts: int, out: int, columns: int) -> Suffixed:
    blocks = (experts, out, columns // mxfp4.BLOCK)
    made = part(torch.uint8, (*blocks, mxfp4.BLOCK // 2), codes), part(torch.uint8, blocks, _powers(columns))
    return dict(zip(mxfp4_experts.suffixes, made, strict=True))


def _powers(columns: int) -> Recipe:
    """Scales at which a row of uniformly random codes has about unit gain: of two neighbours, as many of each as that
    takes."""
    wanted = 1 / (float(mxfp4.VALUES.square().mean()) * columns)  # mean square
    exponent = math.floor(math.log2(wanted) / 2)
    larger = (wanted / 4.0**exponent - 1) / 3

    def make(shape: tuple[int, ...], dtype: torch.dtype, generator: Generator) -> Tensor:
        drawn = torch.rand(shape, device=generator.device, generator=generator) < larger
        return drawn.to(dtype).add_(BIAS + exponent)

    return make
