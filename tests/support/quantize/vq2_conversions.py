"""Conversions into vq2 that tests share: quick settings, the text, what the encoder knew at the end, logits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.engine.load.load import LoadedModel, load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.quantize import by_layer
from localq.quantize.model.calibration_stream import NoCache, Streams
from localq.quantize.request import LayerwiseRequest
from localq.quantize.settings import Effort

COUNT, TOKENS, VOCAB = 6, 64, 256  # of calibration windows
QUICK = Effort(beam=4, columns=64)


def windows(count: int = COUNT, tokens: int = TOKENS, vocab: int = VOCAB) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, vocab, (count, tokens), generator=generator).tolist()


def request(source: Path, out: Path, **changes: Any) -> LayerwiseRequest:
    settings = {"windows": windows(), "device": torch.device("cpu"), "effort": QUICK, **changes}
    return LayerwiseRequest(open_model(source), out, **settings)


def converted(source: Path, out: Path, **changes: Any) -> Path:
    return by_layer.convert(request(source, out, **changes))


@dataclass
class Made:
    """A folder that was made, and the streams of text as they left its last layer."""

    folder: Path
    streams: Streams


def watched(source: Path, out: Path, **changes: Any) -> Made:
    """`converted`, with a look at the text behind the last layer."""
    seen: list[Streams] = []

    class Watched(Streams):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_layer, "Streams", Watched)
        folder = converted(source, out, **changes)
    return Made(folder, seen[0])


def loaded(folder: Path) -> LoadedModel:
    return load(open_model(folder), LoadOptions(device="cpu", dtype="float32"))


def logits(model: LoadedModel, window: list[int]) -> Tensor:
    """f32 [tokens, vocab], of the whole window at once."""
    ids, cache = torch.tensor(window), NoCache(model.model.cache_layout())
    with torch.inference_mode():
        return model.model(ids, torch.arange(len(ids)), cache, len(ids), last_only=False)


def ended(model: LoadedModel, hidden: Tensor) -> Tensor:
    """Logits of a stream behind the last layer [tokens, hidden]."""
    decoder = model.model
    with torch.inference_mode():
        x = decoder.norm(hidden)
        head = decoder.lm_head
        found = x @ decoder.embed_tokens.weight.T if head is None else head(x)
        cap = decoder.config.final_softcap
        return torch.tanh(found / cap) * cap if cap else found
