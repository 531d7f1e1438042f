"""Tiny random models of every family (`tiny_cases`), by transformers and by localq, and their logits.

Weights are large enough that attention is far from uniform. `without` names what a wrong implementation would leave
out: the tests check that leaving it out is seen.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.models import ARCHITECTURES
from localq.models.config import DecoderConfig
from localq.models.decoder import Decoder
from tests.support.models.tiny_case import MUSE_LAST, SHAPE, TEXT_TOWERS, Case
from tests.support.models.tiny_cases import BY_NAME
from tests.support.models.tiny_checkpoints import WITH_IMAGES

CONTEXT = 64  # slots of the cache and of the tables
PREFILL = (16, 7)  # the uneven pieces of the prompt
STEPS = 32  # cached decode steps after it
TOKENS = sum(PREFILL) + STEPS


def token_ids() -> Tensor:
    """The text of all comparisons, int64 [TOKENS]."""
    return torch.randint(3, SHAPE["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(5))


def reference_config(case: Case) -> Any:
    """The transformers configuration of `case`."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**copy.deepcopy(case.config))  # it writes into the dicts that it is given


def _wrapped_reference(config: Any) -> Any:
    """`config`, in the wrapper without which transformers does not run it."""
    from transformers import AutoConfig

    if config.model_type not in TEXT_TOWERS:
        return config
    tied, text, tower = getattr(config, "tie_word_embeddings", False), config.to_dict(), TEXT_TOWERS[config.model_type]
    wrapper = config.model_type.removesuffix("_text")
    return AutoConfig.for_model(wrapper, text_config=text, tie_word_embeddings=tied, **copy.deepcopy(tower))


def reference(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model of `case`, with the same weights at every call, rounded to bf16."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = _wrapped_reference(reference_config(case))
    config._experts_implementation = "eager"  # the others want rows of whole 16 bytes
    auto_class = AutoModelForImageTextToText if config.model_type in WITH_IMAGES else AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    generator = torch.Generator().manual_seed(11)
    from_zero = case.config["model_type"].startswith(
        ("gemma2", "gemma3", "qwen3_5", "muse")
    )  # norms multiply by 1 + weight
    unscaled = case.config["model_type"].startswith("gemma4")  # scores of attention
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            weights = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                plain = not from_zero or name.endswith(("linear_attn.norm.weight", MUSE_LAST))
                weights = (1.0 if plain else 0.0) + 0.3 * weights
                if name.endswith("q_norm.weight") and unscaled:  # else attention sees one slot, and rounding decides
                    weights *= 0.4
            elif "embed" in name:
                weights *= 0.2
            elif name.endswith("A_log"):  # a memory of some ten tokens
                weights -= 2.0
            elif parameter.ndim > 1:
                weights *= 1.5 * parameter.shape[-1] ** -0.5
            elif name.endswith(("router.scale", "per_expert_scale")):
                weights = 1.0 + 0.5 * weights
            parameter.copy_(weights.bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_((1.0 + 0.4 * torch.randn(1, generator=generator)).bfloat16())
            elif name.endswith("expert_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator).bfloat16())
            elif name.endswith("e_score_correction_bias"):
                buffer.copy_((0.3 * torch.randn(buffer.shape, generator=generator)).bfloat16())
    return model


@functools.cache
def reference_logits(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of the whole text at once, without a cache, f32 [TOKENS, vocab]."""
    with torch.no_grad():
        logits: Tensor = reference(BY_NAME[name], dtype)(token_ids()[None], use_cache=False).logits[0].float()
    return logits


def load(config: DecoderConfig, case: Case, weights: dict[str, Tensor], strict: bool = True) -> Decoder:
    """Our model of `config` with the weights of a transformers state dict, through `rename`."""
    module = ARCHITECTURES[case.config["model_type"]]
    named = {module.rename(key): tensor for key, tensor in weights.items()}
    with torch.device("meta"):
        model: Decoder = module.Model(config)
    kept = {name: tensor for name, tensor in named.items() if name is not None and name not in model.redundant}
    kept |= {name: kept[name].mT.contiguous() for name in model.transposed & kept.keys()}
    model.load_state_dict(kept, assign=True, strict=strict)
    model.make_tables(CONTEXT, "cpu")
    return model.eval()


def built(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """Our model of the case `name`, with the weights of `reference`."""
    case = BY_NAME[name]
    config = ARCHITECTURES[case.config["model_type"]].Config.from_dict(case.config)
    return load(config, case, reference(case, dtype).state_dict())


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """`built`, once; not to be changed."""
    return built(name, dtype)


def logits_in_steps(model: Decoder, live: Callable[[int], int] = lambda stop: stop) -> Tensor:
    """Logits of the text from a prefill in pieces and cached single steps, f32 [TOKENS, vocab].

    `live(stop)` is what the model is told for tokens up to position stop - 1.
    """
    ids, parts, start = token_ids(), [], 0
    cache = KVCache(model.cache_layout(), CONTEXT, model.norm.weight.dtype, "cpu")
    with torch.inference_mode():
        for count in (*PREFILL, *(1,) * STEPS):
            stop = start + count
            logits = model(ids[start:stop], torch.arange(start, stop), cache, live(stop), last_only=False)
            assert logits.dtype == torch.float32
            parts.append(logits)
            start = stop
    return torch.cat(parts)


def logits_of_passes(model: Decoder, ids: Tensor, cache: KVCache, start: int, passes: Sequence[int]) -> Tensor:
    """Logits f32 [sum of `passes`, vocab] of passes of these lengths over `ids` from `start` on."""
    parts = []
    with torch.inference_mode():
        for count in passes:
            stop = start + count
            parts.append(model(ids[start:stop], torch.arange(start, stop), cache, stop, last_only=False))
            start = stop
    return torch.cat(parts)
