"""`localq bench --drafts`: decoding with and without drafts on built-in prompts; time of a pass by its rows.

The texts are prose, code, and a file to copy with one name changed. Replies are greedy, and equal with and without
drafts except at near ties of logits: the first position that differs and its logit gap are printed. Random weights have
no tokenizer: only passes are timed. A draft model, if one is named, drafts besides what the text repeats, and its time
per token is printed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from typing import Any, TextIO

import torch

from localq.bench.conditions.conditions import conditions
from localq.bench.models.model_bench import BenchRequest, OnState, form_of
from localq.drafts import MOST, ROWS
from localq.engine.generate import Engine
from localq.engine.load import device as devices
from localq.engine.load.draft import load_draft
from localq.engine.load.draft_head import load_head
from localq.engine.load.load import load
from localq.errors import LocalqError, usage_error
from localq.files.model_folder import ModelFiles
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.sanitize import print_lines, write_json
from localq.stats import Stats
from localq.text.tokenizer import Tokenizer

SOURCE = ("localq.engine.draft", "lookup.py")  # the file to copy
REQUESTS = {
    "prose": "Write a story about a lighthouse keeper who finds a letter in a bottle. Take your time.",
    "code": "Write a Python class for a least-recently-used cache, with type hints, docstrings and unit tests.",
    "copy": "Rename the class LookupIndex to TextIndex. Reply with the complete updated file and nothing else.\n\n",
}
TOKENS = {"prose": 256, "code": 256, "copy": 512}
LEAST_CONTEXT = 4096
PASSES = 20  # of each number of rows
PASS = "{:>14}  {:>9}  {:>10}"
TEXT = "{:<6}  {:>14}  {:>14}  {:>8}  {:>8}  {:>12}  {:>16}"


def run(request: BenchRequest, out: TextIO, on_state: OnState, synthetic: bool) -> dict[str, Any]:
    """Load, measure, print, and end with one JSON line. Raises LocalqError as `load` does, and where no draft can be
    verified. synthetic: random weights."""
    device = devices.pick(request.options.device).device
    on_state(f"loading {request.files.name}")
    ctx = request.options.ctx or max(request.ctx, _context(request.files))
    engine = _engine(request, device, replace(request.options, ctx=ctx, draft_tokens=MOST), on_state)
    if engine.no_drafts:
        raise LocalqError("bench --drafts", engine.no_drafts, "Choose another model.")
    on_state("timing forward passes")
    milliseconds = {rows: 1e3 * engine.pass_seconds(rows, PASSES) for rows in ROWS}
    drafting_s = engine.drafting_seconds(PASSES)
    texts = [] if synthetic else list(_texts(engine, request, on_state))
    result = {
        "schema": 1,
        "model": request.files.name,
        **form_of(engine.model),
        "draft_model": engine.draft_model or None,
        "draft_token_ms": None if drafting_s is None else round(1e3 * drafting_s, 4),
        "passes": [{"rows": rows, "ms": round(each, 4)} for rows, each in milliseconds.items()],
        "texts": texts,
        "conditions": conditions(device, request.plan.seed),
    }
    _print(result, out)
    write_json(out, result)
    return result


def _engine(request: BenchRequest, device: torch.device, options: LoadOptions, on_state: OnState) -> Engine:
    model = load(request.files, options, opened=lambda files: request.opened(files, device), draft=request.draft)
    draft = None
    if request.draft is not None:
        on_state(f"loading {request.draft.name}")
        draft = load_draft(request.draft, model, options, lambda stage, done, total: None)
    elif options.mtp:
        draft = load_head(request.files, model, options, lambda stage, done, total: None)
    return Engine(model, draft_tokens=MOST, draft=draft)


def _context(files: ModelFiles) -> int:
    most = int(files.text_config.get("max_position_embeddings", LEAST_CONTEXT))
    return min(most, LEAST_CONTEXT)


def _texts(engine: Engine, request: BenchRequest, on_state: OnState) -> Iterator[dict[str, Any]]:
    tokenizer = Tokenizer.load(request.files)
    for name, text in REQUESTS.items():
        if name == "copy":
            text += resources.files(SOURCE[0]).joinpath(SOURCE[1]).read_text(encoding="utf-8")
        prompt = _prompt(tokenizer, text)
        room = engine.model.ctx - len(prompt)
        if room < 2:
            why = f"a context of {engine.model.ctx} tokens is too short for a {len(prompt)}-token prompt"
            raise usage_error("--ctx", why, f"Use at least {LEAST_CONTEXT}.")
        on_state(f"decoding {name}")
        yield {"text": name, **_measure(engine, prompt, min(TOKENS[name], room), request.plan.repetitions)}


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.prompt_ids(text)
    return tokenizer.chat_ids([{"role": "user", "content": text}])


def _measure(engine: Engine, prompt: list[int], tokens: int, repetitions: int) -> dict[str, Any]:
    """Both ways in turn, after one run of each to warm up, so that drift affects both alike."""
    rates: dict[int, list[float]] = {0: [], MOST: []}
    replies: dict[int, list[int]] = {}
    stats = Stats()
    for repetition in range(repetitions + 1):
        for drafted, found in rates.items():
            replies[drafted], last = _reply(engine, prompt, tokens, drafted)
            stats = last if drafted else stats
            if repetition:
                found.append(last.tokens_per_s)
    plain, with_drafts = (statistics.median(found) for found in rates.values())
    counts = stats.report()
    names = ("tokens_per_step", "drafted_tokens", "accepted_tokens", "accepted_tokens_by_position")
    return {
        "tokens": stats.generated_tokens,
        "plain_tok_per_s": round(plain, 2),
        "drafted_tok_per_s": round(with_drafts, 2),
        "speedup": round(with_drafts / plain, 3) if plain else None,
        **{name: counts[name] for name in names},
        "drafted_tokens_by_position": counts["drafted_tokens_by_position"],
        **_difference(engine, prompt, replies[0], replies[MOST]),
    }


def _reply(engine: Engine, prompt: list[int], tokens: int, draft_tokens: int) -> tuple[list[int], Stats]:
    ids: list[int] = []
    stats = Stats()
    for step in engine.generate(prompt, Sampling(), max_tokens=tokens, draft_tokens=draft_tokens):
        ids += step.ids
        stats = step.stats
    return ids, stats


def _difference(engine: Engine, prompt: list[int], plain: list[int], drafted: list[int]) -> dict[str, Any]:
    """The first token of the reply that differs, and how far apart the logits of both are; None if none does."""
    pairs = enumerate(zip(plain, drafted, strict=False))
    place = next((place for place, pair in pairs if pair[0] != pair[1]), None)
    gap = None
    if place is not None:
        logits = engine.logits_after([*prompt, *plain[:place]])
        gap = round(abs(float(logits[plain[place]] - logits[drafted[place]])), 4)
    return {"first_difference": place, "logit_gap": gap}


def _place(text: dict[str, Any]) -> str:
    if text["first_difference"] is None:
        return "-"
    return f"{text['first_difference']} (by {text['logit_gap']:.3f})"


def _print(result: dict[str, Any], out: TextIO) -> None:
    one = result["passes"][0]["ms"]
    print_lines(out, PASS.format("rows per pass", "ms", "vs. 1 row"))
    for each in result["passes"]:
        print_lines(out, PASS.format(each["rows"], f"{each['ms']:.3f}", f"{each['ms'] / one:.2f}x"))
    if result["draft_model"]:
        each = result["draft_token_ms"]
        print_lines(out, PASS.format("draft token", f"{each:.3f}", f"{each / one:.2f}x"))
    if not result["texts"]:
        return
    print_lines(out, "", TEXT.format("text", "plain", "drafts", "speedup", "tok/step", "accepted", "first difference"))
    for each in result["texts"]:
        drafted, accepted = (sum(each[name].values()) for name in ("drafted_tokens", "accepted_tokens"))
        line = TEXT.format(
            each["text"], f"{each['plain_tok_per_s']:.1f} tok/s", f"{each['drafted_tok_per_s']:.1f} tok/s",
            f"{each['speedup']:.2f}x" if each["speedup"] else "-", f"{each['tokens_per_step']:.2f}",
            f"{accepted} of {drafted}", _place(each),
        )  # fmt: skip
        print_lines(out, line)
