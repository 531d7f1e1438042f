"""GLQ's quantizer, and what its codes stand for: a process of its own for `rival_quantizers.py`.

    python glq_weights.py SOURCE OUT TEXT DEVICE CODEBOOK

Its encoder returns for every matrix the weights that its codes stand for, with which it computes what the next matrix
sees, and the tensors that it stores. OUT/weights.safetensors gets those weights in f32, OUT/sizes.json the bytes of
those tensors, both by name; a codebook that all matrices share is not among them. Nothing is loaded through GLQ's
kernels.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def mark(weight: Tensor) -> str:
    """Which matrix it is, by its values in bfloat16, as GLQ reads them."""
    return hashlib.sha256(weight.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy()).hexdigest()


def main(source: Path, out: Path, text: Path, device: str, codebook: str) -> None:
    """See the module."""
    names = {mark(tensor): name for name, tensor in load_file(source / "model.safetensors").items()}
    rows = text.read_text(encoding="utf-8").split("\n")
    datasets: Any = types.ModuleType("datasets")
    datasets.load_dataset = lambda *_, **__: {"text": rows}
    sys.modules["datasets"] = datasets  # in the place of a download
    from glq import quantize_model

    weights: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    encode = quantize_model.quantize_layer_e8_shell_rht

    def kept(weight: Tensor, *given: Any, **named: Any) -> Any:
        made, stored, metrics = encode(weight, *given, **named)
        name = names[mark(weight)]
        weights[name] = made[: weight.shape[0], : weight.shape[1]].float().cpu().contiguous()
        sizes[name] = sum(each.nbytes for key, each in stored.items() if key != "tlut")
        return made, stored, metrics

    quantize_model.quantize_layer_e8_shell_rht = kept
    settings = {"bpw": 2, "device": device, "codebook_type": codebook, "workers": 1}
    quantize_model.quantize(str(source), str(out), **settings, **json.loads(os.environ.get("GLQ_SETTINGS", "{}")))
    save_file(weights, out / "weights.safetensors")
    (out / "sizes.json").write_text(json.dumps(sizes))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:6])
