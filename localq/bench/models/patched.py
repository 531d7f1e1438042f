"""`engine.patch_transformers.patch` under random models of common sizes: same tokens, end to end, kernel by kernel.

The models have the widths of 8B, 27B and 70B models and a few layers, so that they fit anywhere and load in seconds.
End to end is transformers' own `generate`, eager, as commonly used: mostly host time at small batches. Kernel times are
the modules' forwards in CUDA graphs, with cold caches. Patched and unpatched runs alternate; medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor, nn

from localq.bench.conditions.conditions import conditions
from localq.bench.kernels import roofline
from localq.bench.models.plan import check_rivals
from localq.engine.load import device as devices
from localq.engine.load.load import free_memory
from localq.engine.patch_transformers import patch, unpatch
from localq.errors import usage_error
from localq.formats.nf4.kernel import nf4_gemv_bytes
from localq.sanitize import print_lines, write_json

SEED, VOCAB, PROMPT = 20, 32_000, 8
BATCHES = (1, 2, 4, 8, 16, 32, 64)
KERNEL_ROWS = (1, 4, 8, 64)
MODULES = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@dataclass(frozen=True)
class ModelSize:
    """Widths of a model whose heads have 128 columns."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int


SIZES = {
    "8B": ModelSize(4096, 14336, 32, 8),
    "27B": ModelSize(5376, 21504, 32, 16),
    "70B": ModelSize(8192, 28672, 64, 8),
}
KERNEL_SIZES = ("27B", "70B")


def run(out: TextIO, layers: int = 2, tokens: int = 32, repeat: int = 3) -> dict[str, Any]:
    """Measure all sizes with `layers` layers, report to `out`, and return the object of its last line.

    A size at which transformers or bitsandbytes fails is listed under "failures". Raises LocalqError: exit 2 for fewer
    than two layers (one layer stays in the cache) or without bitsandbytes, exit 7 without a GPU.
    """
    if layers < 2:
        raise usage_error("layers", f"{layers} is too few", "Use 2 or more.")
    check_rivals("--patched", ["bitsandbytes"])
    device = devices.pick("cuda").device
    roof = roofline.read_bytes_per_s(device)
    sizes: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    for name, size in SIZES.items():
        free_memory()
        print_lines(out, f"{name}: {layers} layers, hidden size {size.hidden}, intermediate size {size.intermediate}")
        try:
            sizes[name] = _measure(name, random_model(size, layers, device), roof, tokens, repeat, out)
        except Exception as error:  # mostly foreign code: report its own text
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            failures.append(f"{name}: {type(error).__name__}: {first[:200]}")
            print_lines(out, f"FAILED {failures[-1]}")
    result: dict[str, Any] = {"schema": 1, "layers": layers, "roof_bytes_per_s": round(roof), "sizes": sizes}
    result["failures"] = failures
    result["conditions"] = conditions(device, SEED)
    write_json(out, result)
    return result


def _measure(name: str, model: Any, roof: float, tokens: int, repeat: int, out: TextIO) -> dict[str, Any]:
    found: dict[str, Any] = {"end_to_end": [end_to_end(model, batch, tokens, repeat, out) for batch in BATCHES]}
    if name in KERNEL_SIZES:
        found["kernels"] = kernel_rows(model, model.device, roof, out)
    return found


def random_model(size: ModelSize, layers: int, device: torch.device) -> Any:
    """Return a llama in float16 whose Linears are `Linear4bit` (double-quantized NF4), with a plain head."""
    from transformers import LlamaConfig, LlamaForCausalLM  # 3 s of start-up: only benchmarks need it

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.half().eval()
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, leaf = path.rpartition(".")
                setattr(layer.get_submodule(parent), leaf, _quantize(module, device))
    return model


def _quantize(module: nn.Linear, device: torch.device) -> nn.Module:
    from bitsandbytes.nn.modules import Linear4bit, Params4bit  # a rival that need not be there

    linear: Any = Linear4bit(  # type: ignore[no-untyped-call]  # bitsandbytes' gap
        module.in_features, module.out_features, bias=False, compute_dtype=torch.float16, quant_type="nf4",
        device="meta",
    )  # fmt: skip
    weight: Any = Params4bit(module.weight.data, requires_grad=False, quant_type="nf4", module=linear)
    linear.weight = weight.to(device)  # quantizes
    quantized: nn.Module = linear
    return quantized


def end_to_end(model: Any, batch: int, tokens: int, repeat: int, out: TextIO) -> dict[str, Any]:
    """Measure `generate` with and without the patch, and count the first sequence's common tokens."""
    generator = torch.Generator().manual_seed(SEED + batch)
    ids = torch.randint(VOCAB, (batch, PROMPT), generator=generator).to(model.device)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    made: dict[bool, Tensor] = {}
    for turn in range(-1, repeat):  # the first one warms up
        for patched in (False, True):
            (patch if patched else unpatch)(model)
            spent, made[patched] = _generate(model, ids, tokens)
            if turn >= 0:
                seconds[patched].append(spent)
    unpatch(model)
    rates = {patched: batch * tokens / statistics.median(all_) for patched, all_ in seconds.items()}
    same = (made[True] == made[False]).long().cumprod(1).sum(1)[0].item() - PROMPT
    print_lines(
        out,
        f"  batch {batch:>2}: {rates[True]:8.1f} tok/s, bitsandbytes {rates[False]:8.1f}"
        f" ({rates[True] / rates[False]:.2f}x), first {same} of {tokens} tokens identical",
    )
    return {
        "batch": batch,
        "patched_tok_per_s": round(rates[True], 1),
        "bitsandbytes_tok_per_s": round(rates[False], 1),
        "ratio": round(rates[True] / rates[False], 3),
        "same_tokens": same,
        "tokens": tokens,
    }


def _generate(model: Any, ids: Tensor, tokens: int) -> tuple[float, Tensor]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    return time.perf_counter() - started, made


def kernel_rows(model: Any, device: torch.device, roof: float, out: TextIO) -> list[dict[str, Any]]:
    """Microseconds of the modules' forwards, with and without the patch."""
    found = []
    for path in MODULES:
        modules = [layer.get_submodule(path) for layer in model.model.layers]
        shape = (modules[0].out_features, modules[0].in_features)
        for rows in KERNEL_ROWS:
            generator = torch.Generator(device).manual_seed(SEED + rows)
            x = torch.randn(rows, shape[1], device=device, generator=generator).half()
            ours, theirs = _times(modules, x, patched=True), _times(modules, x, patched=False)
            share = nf4_gemv_bytes(rows, *shape) / ours.median_us * 1e6 / roof
            print_lines(
                out,
                f"  {shape[0]} x {shape[1]}, {rows:>2} rows: {ours.median_us:7.1f} µs ({share:.0%} of the roofline),"
                f" bitsandbytes {theirs.median_us:7.1f} ({theirs.median_us / ours.median_us:.2f}x)",
            )
            found.append(
                {
                    "shape": list(shape),
                    "rows": rows,
                    "patched_us": round(ours.median_us, 2),
                    "bitsandbytes_us": round(theirs.median_us, 2),
                    "ratio": round(theirs.median_us / ours.median_us, 3),
                    "share_of_roof": round(share, 3),
                }
            )
    return found


def _times(modules: Sequence[nn.Module], x: Tensor, patched: bool) -> roofline.Timing:
    """The modules take turns; those too small for a cold cache are copied until there are enough."""
    weight = modules[0].get_parameter("weight")
    cache = torch.cuda.get_device_properties(x.device).L2_cache_size
    wanted = roofline.copies_for_cold_cache(weight.nbytes, cache)
    copies = [*modules, *(_copy(modules[0]) for _ in range(wanted - len(modules)))]
    for module in copies:
        (patch if patched else unpatch)(module)
    with torch.no_grad():
        timing = roofline.time_cold([partial(module, x) for module in copies])
    for module in copies:
        unpatch(module)
    return timing


def _copy(module: Any) -> nn.Module:
    """The same matrix, quantized again, at addresses of its own."""
    from bitsandbytes.functional import dequantize_4bit

    plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(dequantize_4bit(module.weight.data, module.weight.quant_state), requires_grad=False)
    return _quantize(plain, module.weight.device)
