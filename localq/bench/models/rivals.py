"""The same model in transformers, on the engine's own tensors: nothing is loaded or copied twice.

On a GPU: `generate` with a static cache, which transformers compiles by default. On the CPU: plain `generate`. With
bitsandbytes: every NF4 matrix as its `Linear4bit`, over the same codes, uncompiled, as it is commonly used.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from localq.bench.models import measure
from localq.bench.models.measure import Run
from localq.bench.models.plan import BenchTest
from localq.bench.synthetic.checkpoint import with_layers
from localq.engine.load.load import LoadedModel
from localq.errors import LocalqError
from localq.files.model_folder import ModelFiles
from localq.formats import nf4


class Transformers:
    """transformers' greedy `generate`, as a `measure.Subject`."""

    def __init__(self, reference: Any, ctx: int, seed: int, static: bool) -> None:
        """static: one compiled static cache of `ctx` positions for all runs; else a new dynamic one for each."""
        self._reference, self._seed, self._device = reference, seed, reference.device
        self._settings: dict[str, Any] = {"disable_compile": True}
        self._cache = None
        if static:
            from transformers import StaticCache  # 3 s of start-up: only benchmarks need it

            self._cache = StaticCache(config=reference.config, max_cache_len=ctx)
            self._settings = {"past_key_values": self._cache}

    def run(self, case: BenchTest, repetition: int) -> Run:
        """Run a case; every run computes its depth again, which for decode is not timed."""
        vocab = int(self._reference.config.vocab_size)
        if case.generate:
            stamps, ids = self.generate(measure.prompt(case.start, vocab, self._seed), case.generate + 1)
            return Run(stamps[-1] - stamps[1], stamps[1] - stamps[0], tuple(ids))
        stamps, _ = self.generate(measure.prompt(case.prompt, vocab, self._seed + 2 + repetition), 1)
        return Run(stamps[1] - stamps[0], stamps[1] - stamps[0])

    def can(self, case: BenchTest) -> bool:
        """False for prefill after a depth: `generate` cannot stop the clock in between."""
        return not (case.prompt and case.depth)

    def is_metered(self, case: BenchTest) -> bool:
        """False after a depth, which every run computes again."""
        return not case.depth

    def generate(self, prompt: list[int], count: int) -> tuple[list[float], list[int]]:
        """`count` greedy tokens: when the request came and when each token was there, in seconds, and the tokens."""
        stamps: list[float] = []

        def stamp(ids: Tensor, scores: Tensor) -> Tensor:
            if scores.is_cuda:
                torch.cuda.synchronize()  # transformers waits for every token anyway, a little later
            stamps.append(time.perf_counter())
            return scores

        if self._cache is not None:
            self._cache.reset()  # type: ignore[no-untyped-call]  # transformers' gap
        ids = torch.tensor([prompt], device=self._device)
        started = time.perf_counter()
        made = self._reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=[stamp],
            **self._settings,
        )
        return [started, *stamps], made[0, len(prompt) :].tolist()


def transformers_model(model: LoadedModel, files: ModelFiles) -> Any:
    """transformers' model over the tensors of `model`, whose matrices must be plain ones."""
    reference = _skeleton(model, files)
    _adopt(reference, dict(model.model.named_parameters()))
    return reference


def bitsandbytes_model(model: LoadedModel, files: ModelFiles) -> Any:
    """transformers' model with `Linear4bit` over the codes of `model`, which a tiled order makes copies of."""
    reference = _skeleton(model, files)
    quantized = {path: module for path, module in model.model.named_modules() if isinstance(module, nf4.Linear)}
    if not quantized:
        raise LocalqError("bitsandbytes", "the model contains no NF4 weights to compare", "Benchmark NAME@nf4.")
    for path, module in quantized.items():
        parent, _, leaf = _theirs(path).rpartition(".")
        setattr(reference.get_submodule(parent), leaf, _linear4bit(module, model.dtype))
    _adopt(reference, dict(model.model.named_parameters()))
    return reference


def _linear4bit(module: nf4.Linear, dtype: torch.dtype) -> nn.Module:
    from bitsandbytes.functional import QuantState  # a rival that need not be there
    from bitsandbytes.nn.modules import Linear4bit, Params4bit

    packed = module.packed
    nested = None
    if packed.nested_absmax is not None:
        nested = QuantState(  # type: ignore[no-untyped-call]  # bitsandbytes' gap, as below
            packed.nested_absmax, code=packed.nested_map, blocksize=nf4.NESTED_BLOCK, dtype=torch.float32
        )
    state = QuantState(  # type: ignore[no-untyped-call]
        packed.absmax.reshape(-1), torch.Size(packed.shape), nf4.CODE_MAP.to(packed.codes.device), nf4.BLOCK, "nf4",
        dtype, packed.offset, nested,
    )  # fmt: skip
    linear = Linear4bit(  # type: ignore[no-untyped-call]
        packed.shape[1], packed.shape[0], bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    linear.weight = Params4bit(
        packed.codes.reshape(-1, 1), requires_grad=False, quant_state=state, blocksize=nf4.BLOCK, quant_type="nf4",
        bnb_quantized=True, module=linear,
    )  # fmt: skip
    linear.quant_state = state
    if module.bias is not None:
        linear.bias = nn.Parameter(module.bias, requires_grad=False)
    return linear


def _skeleton(model: LoadedModel, files: ModelFiles) -> Any:
    """The modules, with parameters on the meta device and buffers in place."""
    from transformers import AutoConfig, AutoModelForCausalLM  # 3 s of start-up: only benchmarks need it

    flat = with_layers(files.config, len(model.model.layers))
    fields = {key: value for key, value in flat.items() if key not in ("model_type", "quantization_config")}
    config = AutoConfig.for_model(flat["model_type"], **fields)
    with _parameters_on_meta():
        reference = AutoModelForCausalLM.from_config(config, dtype=model.dtype)  # type: ignore[no-untyped-call]
    return reference.eval()


def _adopt(reference: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Give `reference` our tensors under its names; every parameter must get one."""
    for name, parameter in parameters.items():
        path, _, leaf = _theirs(name).rpartition(".")
        setattr(reference.get_submodule(path), leaf, parameter)
    reference.tie_weights()
    device = next(iter(parameters.values())).device
    for module in reference.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    if missing := [name for name, parameter in reference.named_parameters() if parameter.is_meta]:
        raise LocalqError(
            "bench", f"the transformers model has no weight named {missing[0]!r}", "Report this as a bug."
        )


def _theirs(name: str) -> str:
    return name if name.startswith("lm_head") else f"model.{name}"


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside have their parameters on the meta device: no memory, no random numbers for 70B weights.

    Buffers stay real, because transformers computes rotary frequencies when it builds them.
    """
    register: Callable[[nn.Module, str, nn.Parameter | None], None] = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        moved = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, moved)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
