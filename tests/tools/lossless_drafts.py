"""Replies with drafts against plain decoding on the CPU reference: `python -m tests.tools.lossless_drafts [COUNT]`.

COUNT (200) seeded replies of a tiny model of each architecture with each source of drafts, draft models and MTP blocks
among them, the passes in step and one ahead: greedy, T 0.7 and 1.0, filters, penalty, DRY, XTC, constraints, stop ids,
interrupts, regenerated replies and next turns. Prints what was drafted and accepted; ends with an error at the first
token that differs.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.files.model_folder import ModelFiles, open_model
from localq.planner.load_options import LoadOptions
from tests.support.engine import mtp_models
from tests.support.engine.draft_models import KINDS, engine_with, save_draft
from tests.support.engine.lossless import PlainReplies, case_of, compare
from tests.support.models.tiny_checkpoints import make_checkpoint

TARGETS = ("llama", "qwen3_5_text", "qwen3_5_moe_text")  # the latter have recurrent layers


def main(count: int = 200) -> None:
    """Run the campaign."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for kind in TARGETS:
            path = make_checkpoint(Path(folder) / kind, kind, dtype=torch.float32, initializer_range=0.15)
            files, options = open_model(path), LoadOptions(device="cpu", dtype="float32", draft_tokens=7)
            plain, drafting = plain_replies(files, options), Engine(load(files, options), draft_tokens=7)
            engines = {"oracle": drafting, "lookup": drafting}
            for draft in KINDS if kind == "llama" else ():
                engines[f"model ({draft})"] = engine_with(path, save_draft(draft, path, Path(folder) / draft))
            for source, engine in engines.items():
                run(kind, source, plain, engine, count)
            for block in mtp_models.KINDS if kind in mtp_models.MODEL_TYPES else ():
                path = mtp_models.save_mtp(Path(folder) / f"{kind} {block}", kind, block)
                files = open_model(path)
                run(kind, f"mtp ({block})", plain_replies(files, options), mtp_models.engine_of(path), count)


def plain_replies(files: ModelFiles, options: LoadOptions) -> PlainReplies:
    """Those of one engine, which reuses its cache."""
    engine = Engine(load(files, options))
    return PlainReplies(lambda: engine)


def run(kind: str, source: str, plain: PlainReplies, engine: Engine, count: int) -> None:
    """Compare the replies of two engines."""
    totals, started = {"drafted": 0, "accepted": 0}, time.monotonic()
    for number in range(count):
        engine._steps.lookahead = number % 2
        found = compare(plain, engine, case_of(number), source)
        totals = {name: totals[name] + found[name] for name in totals}
    print(f"{kind}, {source}: {count} replies equal; {totals} in {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
