"""Chats of a model with itself, to calibrate it on: how `localq/data/chats.jsonl` is made.

    python -m tests.tools.make_chats smollm2.gguf localq/data/chats.jsonl

The prompts are ours (`tests/data/prompts/calibration.txt`), the answers the model's, in float32 on the CPU: a model is
fitted best to what it writes itself (LLM-QAT, Liu et al. 2023, arXiv 2305.17888). Every chat draws from a seed of its
own, its number; other processors round otherwise, so there answers may part ways.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from localq.files.model_folder import ModelFiles, open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.text.tokenizer import Tokenizer
from tests.support.quantize.chat_prompts import Chat, read_prompts

TEMPERATURE, MOST_TOKENS, BATCH, MOST_TURNS = 0.6, 200, 32, 10
ENDS = (". ", ".\n", "! ", "!\n", "? ", "?\n", "\n")


@dataclass(frozen=True)
class Work:
    """What answers, and where."""

    source: Path
    device: str


def full_model(files: ModelFiles) -> LlamaForCausalLM:
    """The weights of `files`, dequantized where they are quantized, in float32."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**files.config))
    with open_checkpoint(files) as checkpoint:
        weights = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


@torch.inference_mode()
def replies(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], seeds: Sequence[int], stops: frozenset[int]
) -> list[list[int]]:
    """What follows each of `prompts` (ids), MOST_TOKENS at most, without the token that stopped it."""
    longest = max(map(len, prompts))
    at = model.device
    width = torch.tensor([longest - len(each) for each in prompts], device=at)
    ids = torch.tensor([[0] * (longest - len(each)) + list(each) for each in prompts], device=at)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    cache, found, rows = DynamicCache(), [list[int]() for _ in prompts], list(range(len(prompts)))
    for step in range(MOST_TOKENS):
        known = longest + step
        mask = torch.arange(known, device=at) >= width[rows, None]
        positions = torch.arange(known - ids.shape[1], known, device=at) - width[rows, None]
        logits = (
            model(
                ids, attention_mask=mask, position_ids=positions.clamp(min=0), past_key_values=cache, logits_to_keep=1
            )
            .logits[:, -1]
            .cpu()
        )
        chosen = [_drawn(row, generators[index]) for row, index in zip(logits, rows, strict=True)]
        going = [place for place, id in enumerate(chosen) if id not in stops]
        for place in going:
            found[rows[place]].append(chosen[place])
        if not going:
            break
        if len(going) < len(rows):
            cache.batch_select_indices(torch.tensor(going, device=at))
        rows, ids = [rows[place] for place in going], torch.tensor([[chosen[place]] for place in going], device=at)
    return found


def _drawn(logits: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(torch.softmax(logits / TEMPERATURE, -1), 1, generator=generator))


def whole(text: str) -> str:
    """`text` that was cut, up to the end of its last sentence or line."""
    end = max((text.rfind(mark) + 1 for mark in ENDS), default=0)
    return text[:end].rstrip() or text


def answer_all(work: Work, chats: Sequence[Chat], jobs: int) -> None:
    """Give every turn of `chats` an answer: of all the first one first, in batches that `jobs` processes share."""
    tokenizer = Tokenizer.load(open_model(work.source))
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (work,)) as pool:
        for turn in range(max(len(chat.asked) for chat in chats)):
            left = [(number, chat) for number, chat in enumerate(chats) if turn < len(chat.asked)]
            for _, chat in left:
                chat.messages.append({"role": "user", "content": chat.asked[turn]})
            prompts = [(tokenizer.chat_ids(chat.messages), MOST_TURNS * number + turn) for number, chat in left]
            batches = [prompts[first : first + BATCH] for first in range(0, len(prompts), BATCH)]
            said = (ids for part in pool.map(_batch, batches) for ids in part)
            for (_, chat), ids in zip(left, said, strict=True):
                text = tokenizer.decode(ids).strip()
                text = whole(text) if len(ids) == MOST_TOKENS else text
                chat.messages.append({"role": "assistant", "content": text})


def _begin(work: Work) -> None:
    global _model, _stops
    torch.set_num_threads(1)
    files = open_model(work.source)
    _model, _stops = full_model(files).to(work.device), Tokenizer.load(files).stop_ids


def _batch(prompts: Sequence[tuple[list[int], int]]) -> list[list[int]]:
    found = replies(_model, [ids for ids, _ in prompts], [seed for _, seed in prompts], _stops)
    print(f"{len(found)} answers, {sum(map(len, found))} tokens", flush=True)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="a Llama model with a chat template: a folder or a .gguf file")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", default="calibration", choices=("calibration", "held_out"))
    parser.add_argument("--jobs", type=int, default=2, help="processes; they change nothing in the result")
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    chats = read_prompts(asked.prompts)
    answer_all(Work(asked.source, asked.device), chats, asked.jobs)
    lines = (json.dumps({"messages": chat.messages}, ensure_ascii=False) + "\n" for chat in chats)
    asked.out.write_text("".join(lines), encoding="utf-8", newline="\n")
    print(f"{asked.out}: {asked.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
