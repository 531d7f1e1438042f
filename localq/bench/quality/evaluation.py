"""`localq eval`: perplexity of a model on a text, and its distance from a reference."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from localq.bench.conditions.conditions import conditions
from localq.bench.quality import bits, tasks
from localq.bench.quality.perplexity import Scores, score
from localq.engine.load.load import LoadedModel, free_memory, is_out_of_memory, load, out_of_memory
from localq.engine.scoring import Decode, Prefill
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files.model_folder import ModelFiles
from localq.formats.dense_checkpoint import dequantized
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.text import token_windows
from localq.text.token_windows import Windows
from localq.text.tokenizer import Tokenizer
from localq.wording import OnProgress

REFERENCE = "reference"


@dataclass(frozen=True)
class SpeedTest:
    """A timed reply of `generate` tokens, which needs `positions` of the cache; `run` measures it."""

    generate: int
    positions: int
    run: Callable[[LoadedModel], dict[str, Any]]


@dataclass(frozen=True)
class EvaluationRequest:
    """An evaluation of one model.

    raw        the text; text: its name
    window     tokens per window; most: limit of windows, None = all
    against    None, `REFERENCE` (the weights of `rival`, else of `files`, dequantized), or another model: `rival`
    rival      must have the vocabulary of `files`, even with `against` None
    decode     single steps to compare with prefill passes, 0 = none
    speed      also time a reply; None = no
    tasks      of each kind (`tasks.KINDS`) to score, 0 = none
    """

    files: ModelFiles
    options: LoadOptions
    raw: bytes
    text: str
    window: int = 2048
    most: int | None = None
    against: str | None = None
    rival: ModelFiles | None = None
    decode: int = 0
    speed: SpeedTest | None = None
    tasks: int = 0


def run(request: EvaluationRequest, on_progress: OnProgress = lambda stage, done, total: None) -> dict[str, Any]:
    """Evaluate; returns the object that `--json` prints.

    Raises LocalqError: exit 2 for an unsuitable text, window or reference, and as `load` does.
    """
    started = time.perf_counter()
    gptq, llamacpp = _windows(request)
    model = load(request.files, _options(request), on_progress)
    timed = None
    if request.speed is not None:  # alone on the device
        on_progress("timing a reply", 0, 0)
        timed = request.speed.run(model)
        free_memory()
    scored = _score_tasks(request, model, on_progress)
    reference, notes = _reference(request, model, on_progress)
    if model.device.type == "cuda":  # the budget is the model's: the evaluation comes on top
        torch.cuda.set_per_process_memory_fraction(1.0, model.device)
    try:
        found = _judge(request, model, reference, gptq, llamacpp, on_progress)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(request.files.name, "during the evaluation", error) from None
    facts = conditions(model.device, 0)
    del facts["seed"]  # nothing is random
    size = bits.size_of(request.files, model.head_bits)
    return {
        "model": request.options.name or request.files.name,
        **found,
        "bits_per_weight": size.bits_per_weight,
        "weights_bytes": size.weights_bytes,
        "speed": timed,
        "tasks": scored,
        "window": request.window,
        "n_windows": len(gptq.ids),
        "n_windows_llamacpp": len(llamacpp.ids),
        "text": request.text,
        "text_sha256": hashlib.sha256(request.raw).hexdigest(),
        "against": request.against,
        "against_dtype": None if reference is None else _name(reference.dtype),
        "format": model.format,
        "dtype": _name(model.dtype),
        "kv_bits": model.kv_bits,
        "head": model.head_bits,
        "embed": model.embed,
        "ctx": model.ctx,
        "duration_s": round(time.perf_counter() - started, 3),
        "notes": list(dict.fromkeys((*model.notes, *notes))),
        "conditions": facts,
    }


def _score_tasks(request: EvaluationRequest, model: LoadedModel, on_progress: OnProgress) -> dict[str, Any] | None:
    if not request.tasks:
        return None
    found = tasks.run(model, Tokenizer.load(request.files), tasks.load_tasks(request.tasks), on_progress)
    free_memory()
    return found


def _judge(
    request: EvaluationRequest,
    model: LoadedModel,
    reference: LoadedModel | None,
    gptq: Windows,
    llamacpp: Windows,
    on_progress: OnProgress,
) -> dict[str, Any]:
    length = max(len(ids) for ids in (*gptq.ids, *llamacpp.ids))
    tested, plain = Prefill(model, length), None if reference is None else Prefill(reference, length)
    main = score(tested, plain, gptq, model.vocab, lambda done, total: on_progress("windows", done, total))
    other = score(
        tested, None, llamacpp, model.vocab, lambda done, total: on_progress("llama.cpp windows", done, total)
    )
    steps = Scores(0.0)
    if request.decode:
        on_progress("single steps", 0, 0)
        steps = score(Decode(model, length), tested, Windows([gptq.ids[0][: request.decode + 1]]), model.vocab)
    return {
        "perplexity": main.perplexity,
        "perplexity_llamacpp": other.perplexity,
        "perplexity_reference": main.reference_perplexity,
        "kl": main.kl,
        "top1": main.top1,
        "decode_tokens": request.decode,
        "decode_kl": steps.kl,
        "decode_top1": steps.top1,
    }


def _name(dtype: torch.dtype) -> str:
    """Return the dtype as on the command line: "float16"."""
    return str(dtype).removeprefix("torch.")


# ---- text, options, reference


def _windows(request: EvaluationRequest) -> tuple[Windows, Windows]:
    """Return the text in both conventions. All checks of it run before weights are read."""
    if not request.raw.strip():
        raise usage_error(request.text, "the text is empty", "Use a text that is at least one window long.")
    try:
        text = request.raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise usage_error(request.text, f"not UTF-8 text ({error})", "Use plain UTF-8 text.") from None
    if request.decode >= request.window:
        why = f"{request.decode} steps do not fit in a window of {request.window} tokens"
        raise usage_error("--decode", why, "Use fewer steps, or a larger --window.")
    tokenizer = Tokenizer.load(request.files)
    if request.tasks:
        tasks.check(tokenizer)
    if request.rival is not None:
        _check_vocabulary(request, request.rival, tokenizer)
    of = (tokenizer, text, request.window, request.most, request.text)
    return token_windows.gptq(*of), token_windows.llamacpp(*of)


def _check_vocabulary(request: EvaluationRequest, rival: ModelFiles, ours: Tokenizer) -> None:
    """Raise LocalqError (exit 2) unless both models have the same tokens and the same number of logits."""
    widths = [files.text_config.get("vocab_size") for files in (request.files, rival)]
    known = [tokenizer.backend.get_vocab(with_added_tokens=True) for tokenizer in (ours, Tokenizer.load(rival))]
    if widths[0] == widths[1] and known[0] == known[1]:
        return
    sizes = f"{widths[1]} and {widths[0]} tokens" if widths[0] != widths[1] else "same size, different tokens"
    name, subject = request.against, "--against"
    if name in (None, REFERENCE):
        name, subject = rival.name, "eval"
    why = f"the vocabulary of {name} differs from that of {request.files.name} ({sizes})"
    raise usage_error(subject, why, "Compare models with the same tokenizer.")


def _options(request: EvaluationRequest) -> LoadOptions:
    """Return the options with the context length of what is asked for, unless a longer one is set."""
    needs = {f"window of {request.window} tokens": request.window}
    if request.speed is not None:
        needs[f"reply of {request.speed.generate} tokens"] = request.speed.positions
    if request.tasks:
        needs["task"] = min(tasks.CONTEXT, int(request.files.text_config.get("max_position_embeddings", tasks.CONTEXT)))
    what = max(needs, key=needs.__getitem__)
    needed = needs[what]
    if request.options.ctx is None:
        return replace(request.options, ctx=needed)
    if request.options.ctx < needed:
        why = f"a context of {request.options.ctx} tokens is too short for a {what}"
        raise usage_error("--ctx", why, "Remove --ctx.")
    return request.options


def _reference(
    request: EvaluationRequest, model: LoadedModel, on_progress: OnProgress
) -> tuple[LoadedModel | None, tuple[str, ...]]:
    """Load the model to compare with beside `model`, without memory savings; returns it with notes for the user.

    `REFERENCE` is the definition of the format: dequantized weights in float32; where those do not fit, in the dtype of
    `model`.
    """
    if request.against is None:
        return None, ()
    options = replace(
        request.options, name=request.against, ctx=model.ctx, kv_bits=16, vram_bytes=None, embed="device", head="auto",
        force=False,
    )  # fmt: skip
    if request.rival is not None and request.against != REFERENCE:
        found = load(request.rival, options, on_progress)
        return found, found.notes
    weights = request.rival or request.files
    try:
        found = _dense(weights, replace(options, dtype="float32", head="16"), model.device, on_progress)
    except LocalqError as error:
        if error.exit_code != ExitCode.DOES_NOT_FIT or model.dtype == torch.float32:
            raise
    else:
        return found, found.notes
    free_memory()
    own = replace(options, dtype=_name(model.dtype), head="16")
    found = _dense(weights, own, model.device, on_progress)
    return found, (*found.notes, f"the reference runs in {own.dtype} because it does not fit in memory in float32")


def _dense(files: ModelFiles, options: LoadOptions, device: torch.device, on_progress: OnProgress) -> LoadedModel:
    return load(
        files, options, on_progress, opened=lambda each: dequantized(open_checkpoint(each), device, torch.float32)
    )
