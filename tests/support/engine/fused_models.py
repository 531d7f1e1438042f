"""Tiny random decoders of every family in shapes that the kernels take, on a GPU in 16 bit, and their f32 twins.

The cases are those of `tiny_models`, with widths of whole NF4 blocks; no two dimensions are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from localq.engine.cache import KVCache
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.state import StepState
from localq.formats import nf4
from localq.models import ARCHITECTURES
from localq.models.decoder import Decoder
from localq.models.layers import OffsetRMSNorm, PlainLinear
from tests.support.models.tiny_cases import BY_NAME

SHAPE = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_hidden_layers": 3, "head_dim": 24}
PHI3 = {**SHAPE, "hidden_size": 256, "head_dim": 32}  # it has no head_dim of its own
DELTA = {"num_hidden_layers": 5, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
CONVOLVED = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 8}
LISTS = {"short_factor": [1.0 + 0.05 * i for i in range(12)], "long_factor": [1.0 + 0.4 * i for i in range(12)]}
GEMMA4 = {  # of 6 layers; those without a window have heads of 512 columns
    **SHAPE, "num_hidden_layers": 6, "head_dim": 32, "num_key_value_heads": 4, "global_head_dim": 512,
    "num_global_key_value_heads": 2,
}  # fmt: skip
GEMMA4_CASES: dict[str, dict[str, Any]] = {  # name in tiny_models -> as `CASES`: like 31B, 12B, E4B, 26B-A4B
    "gemma4": GEMMA4,
    "gemma4-unified": {**GEMMA4, "num_attention_heads": 16, "num_global_key_value_heads": 1, "attention_bias": False},
    "gemma4-inputs": {
        **GEMMA4, "hidden_size_per_layer_input": 64, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    },
    "gemma4-experts": {**GEMMA4, "moe_intermediate_size": 64},
}  # fmt: skip
_GEMMA4_HEADS = {"head_dim": 64, "global_head_dim": 512}
GEMMA4_CHECKPOINTS: dict[str, dict[str, Any]] = {  # of `tiny_checkpoints`, type gemma4_text
    "dense": _GEMMA4_HEADS,
    "inputs": {
        **_GEMMA4_HEADS, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 320, "num_hidden_layers": 4,
        "num_kv_shared_layers": 2, "attention_k_eq_v": False,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "experts": {
        **_GEMMA4_HEADS, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 64,
    },
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {  # name in tiny_models -> what is changed besides
    "llama-biases": SHAPE,
    "llama-llama3-tied": SHAPE,
    "ministral3": SHAPE,
    "mistral-window": SHAPE,
    "muse-glimmer-tied": SHAPE,
    "exaone4-turns": {**SHAPE, "num_hidden_layers": 5},
    "granite-eps": SHAPE,
    "lfm2-conv": CONVOLVED,
    "lfm2-moe": {**CONVOLVED, "moe_intermediate_size": 64},
    "olmo3-ropes": {**SHAPE, "num_hidden_layers": 4},
    "qwen2-upper-windows": SHAPE,
    "qwen3": SHAPE,
    "gemma2": SHAPE,
    "gemma3-text": {**SHAPE, "num_hidden_layers": 7},
    "phi3-window": PHI3,
    "qwen3.5": {**SHAPE, **DELTA},
    "qwen3.5-moe": {**SHAPE, **DELTA, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 192},
    "seed-oss-biases": {**SHAPE, "num_attention_heads": 9},
    "phi3-longrope-short": {**PHI3, "rope_scaling": {"type": "longrope", **LISTS}},
    "smollm3-biases-windows": {**SHAPE, "num_hidden_layers": 5},
    **GEMMA4_CASES,
}
CONTEXT, PROMPT, STEPS = 72, 23, 40
UNCUT_PHI3 = {**PHI3, "hidden_size": 192, "head_dim": 24}  # 320 * 3 blocks: gate and up share a nested scale


def config_of(name: str, changes: dict[str, Any]) -> Any:
    """The configuration of the case `name` with `changes`."""
    config = {**BY_NAME[name].config, **changes}
    return ARCHITECTURES[config["model_type"]].Config.from_dict(config)


def pair(
    name: str, changes: dict[str, Any], dtype: torch.dtype, quantized: bool, context: int, keep: tuple[str, ...] = ()
) -> tuple[Decoder, Decoder]:
    """(model on the GPU in `dtype`, the same weights in float32 on the CPU).

    quantized: the block linears are NF4 in the tiled order, but for those whose path ends in one of `keep` or whose
    columns are no whole blocks.
    """
    module = ARCHITECTURES[BY_NAME[name].config["model_type"]]
    with torch.device("meta"):
        ours, exact = module.Model(config_of(name, changes)), module.Model(config_of(name, changes))
    weights = _weights(ours, dtype)
    packed = {
        path: nf4.quantize(weights[f"{path}.weight"])
        for path, linear in ours.named_modules()
        if quantized and isinstance(linear, nn.Linear) and "layers." in path
        if not path.endswith(keep) and linear.in_features % nf4.BLOCK == 0 and not isinstance(linear, PlainLinear)
    }
    ours.load_state_dict({key: tensor.to("cuda", dtype) for key, tensor in weights.items()}, assign=True)
    for path, each in packed.items():
        weights[f"{path}.weight"] = nf4.dequantize(each, torch.float32)
        parent, _, leaf = path.rpartition(".")
        bias = ours.get_submodule(path).bias
        linear = nf4.Linear(each.to("cuda"), None if bias is None else bias.detach())
        linear.tile_()
        setattr(ours.get_submodule(parent), leaf, linear)
    exact.load_state_dict(weights, assign=True)
    ours.make_tables(context, "cuda")
    exact.make_tables(context, "cpu")
    return ours.eval(), exact.eval()


def _weights(model: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """f32, rounded to `dtype`: norms and scales around their neutral value, matrices that make attention far from
    uniform."""
    generator, found = torch.Generator().manual_seed(11), {}
    from_zero = {name for name, module in model.named_modules() if isinstance(module, OffsetRMSNorm)}
    for name, parameter in model.named_parameters():
        weights = torch.randn(parameter.shape, generator=generator)
        if "norm" in name or "scal" in name:
            weights = (0.0 if name.removesuffix(".weight") in from_zero else 1.0) + 0.3 * weights
        elif "embed" in name:
            weights *= 0.2
        elif parameter.ndim > 1:
            weights *= 1.5 * parameter.shape[-1] ** -0.5
        found[name] = weights.to(dtype).float()
    return found


def step_of(model: Decoder, context: int, bits: int = 16, chunk: int | None = None) -> tuple[FusedStep, KVCache]:
    """The fused step of a model on the GPU, with a cache of its own; chunk: windows slide."""
    device, dtype = torch.device("cuda", 0), model.norm.weight.dtype
    cache = KVCache(model.cache_layout(), context, dtype, device, bits, chunk)
    return FusedStep(model, cache, StepState(SamplerState(model.config.vocab_size, context, device), device)), cache


def wide_llama(hidden: int, layers: int, dtype: torch.dtype, context: int) -> Decoder:
    """A plain decoder with random weights made on the GPU, large enough that its kernels take longer than launches."""
    module = ARCHITECTURES["llama"]
    config = {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512,
        "max_position_embeddings": context,
    }
    with torch.device("meta"):
        model: Decoder = module.Model(module.Config.from_dict(config))
    torch.cuda.set_per_process_memory_fraction(1.0)  # a load before this one may have held the process to its budget
    torch.manual_seed(3)
    for name, parameter in list(model.named_parameters()):
        made = torch.randn(parameter.shape, dtype=dtype, device="cuda") * hidden**-0.5
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(1 + made if "norm" in name else made, False))
    model.make_tables(context, "cuda")
    return model.eval()


def capped(logits: Tensor, cap: float) -> Tensor:
    """As the model's own head does it."""
    return torch.tanh(logits / cap) * cap if cap else logits


def by_modules(model: Decoder, ids: Tensor, device: str) -> Tensor:
    """f32 [STEPS, vocab] on the CPU, one pass over the whole text."""
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, device)
    every = torch.arange(len(ids), device=device)
    return model(ids.to(device), every, cache, len(ids), last_only=False)[PROMPT:].cpu()


def by_launches(model: Decoder, ids: Tensor) -> Tensor:
    """f32 [STEPS, vocab] on the CPU: the prompt in one pass of the modules, then token by token."""
    step, cache = step_of(model, CONTEXT)
    ids, rows = ids.to("cuda"), []
    model(ids[:PROMPT], torch.arange(PROMPT, device="cuda"), cache, PROMPT)
    step.logits.fill_(float("nan"))
    for position in range(PROMPT, len(ids)):
        step.state.token.copy_(ids[position : position + 1])
        step.state.position.fill_(position)
        step.run(greedy=True)
        rows.append(capped(step.logits[0].clone(), step.softcap))
        assert rows[-1][step.state.chosen] >= rows[-1].max() - 1e-5  # a soft cap makes near ties
        assert int(step.state.position) == position + 1
    return torch.stack(rows).cpu()


def by_rows(model: Decoder, ids: Tensor, rows: int) -> Tensor:
    """As `by_launches`, some tokens at a time, all of them known."""
    device = torch.device("cuda", 0)
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, device, rows=rows)
    state = StepState(SamplerState(model.config.vocab_size, CONTEXT, device), device)
    step, ids, found = FusedStep(model, cache, state, rows), ids.to(device), []
    model(ids[:PROMPT], torch.arange(PROMPT, device=device), cache, PROMPT)
    for position in range(PROMPT, len(ids), rows):
        state.tokens[:rows] = ids[position : position + rows]
        state.position.fill_(position)
        step.forward()
        found.append(capped(step.logits.clone(), step.softcap))
    return torch.cat(found).cpu()


def text_of(vocab: int, seed: int = 5) -> Tensor:
    """Ids of a prompt and the steps behind it, int64 [PROMPT + STEPS]."""
    return torch.randint(3, vocab, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(seed))


def assert_as_good_as_the_modules(ours: Decoder, exact: Decoder, seed: int = 5, rows: int = 1) -> None:
    """The modules in the same 16-bit type round more often: the launches may be twice as far off."""
    ids = text_of(ours.config.vocab_size, seed)
    with torch.inference_mode():
        expected = by_modules(exact, ids, "cpu")
        naive = (by_modules(ours, ids, "cuda") - expected).square().mean().sqrt().item()
        found = by_launches(ours, ids) if rows == 1 else by_rows(ours, ids, rows)
        error = (found - expected).square().mean().sqrt().item()
    size = expected.square().mean().sqrt().item()
    assert error <= 2 * naive + 1e-6 * size, f"off by {error:.3g}, modules {naive:.3g}, logits {size:.3g}"
    assert naive < 0.2 * size  # else nothing was compared
