"""How a quantized model chats: its greedy answers beside those of the full weights, and how far it is from them.

    python -m tests.tools.judge_chats smollm2.gguf MODEL [MODEL ...] [--device cpu] [--tokens 100]

The prompts (`tests/data/prompts/held_out.txt`) are none of those that `localq/data/chats.jsonl` was made of. Every
model goes on with what the full weights have answered before. The figures, of each model, are over the tokens of the
answers of the full weights, ends of turns included: the share that both would choose first, and the mean KL.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localq.bench.quality.perplexity import score
from localq.engine.generate import Engine
from localq.engine.load.load import LoadedModel, load
from localq.engine.scoring import Prefill
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.text.token_windows import Windows
from localq.text.tokenizer import Tokenizer
from tests.support.engine.engine_runs import ids_of
from tests.support.quantize.chat_prompts import read_prompts

CONTEXT = 2048


@dataclass(frozen=True)
class Turn:
    """What was asked last, all that the model reads, and what the full weights say (ids, perhaps with their end)."""

    asked: str
    prompt: list[int]
    answer: list[int]


def opened(path: Path, device: str, dtype: str = "auto") -> LoadedModel:
    """The model at `path`."""
    return load(open_model(path), LoadOptions(path.name, device, dtype, CONTEXT))


def answers(model: LoadedModel, prompts: Sequence[list[int]], stops: frozenset[int], most: int) -> list[list[int]]:
    """What `model` says to each of `prompts`, greedily."""
    engine = Engine(model)
    return [ids_of(engine, prompt, stop_ids=stops, max_tokens=most) for prompt in prompts]


def held_out(model: LoadedModel, tokenizer: Tokenizer, most: int) -> list[Turn]:
    """The turns of the chats that `model` has about the prompts."""
    engine, found, end = Engine(model), list[Turn](), sorted(tokenizer.stop_ids)[0]
    for chat in read_prompts("held_out"):
        messages = list(chat.messages)
        for asked in chat.asked:
            messages.append({"role": "user", "content": asked})
            prompt = tokenizer.chat_ids(messages)
            ids = ids_of(engine, prompt, stop_ids=tokenizer.stop_ids, max_tokens=most)
            found.append(Turn(asked, prompt, ids if len(ids) == most else [*ids, end]))
            messages.append({"role": "assistant", "content": tokenizer.decode(ids).strip()})
    return found


def judged(model: LoadedModel, full: LoadedModel, turns: Sequence[Turn]) -> tuple[float, float, int]:
    """Share of the same top token, mean KL in nats, and over how many tokens."""
    top1 = kl = count = 0.0
    for turn in turns:
        read = Windows([turn.prompt + turn.answer], len(turn.prompt) - 1)
        found = score(Prefill(model), Prefill(full), read, model.vocab)
        assert found.top1 is not None
        assert found.kl is not None
        top1 += found.top1 * len(turn.answer)
        kl += found.kl * len(turn.answer)
        count += len(turn.answer)
    return top1 / count, kl / count, int(count)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path, help="the full weights: a folder or a .gguf file")
    parser.add_argument("models", type=Path, nargs="+", help="what was made of them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=100, help="the most of an answer")
    asked = parser.parse_args()
    tokenizer = Tokenizer.load(open_model(asked.full))
    full = opened(asked.full, asked.device, "float32")
    turns = held_out(full, tokenizer, asked.tokens)
    said, lines = [[tokenizer.decode(turn.answer) for turn in turns]], list[str]()
    for path in asked.models:
        model = opened(path, asked.device)
        top1, kl, count = judged(model, full, turns)
        lines.append(f"{path.name}: same top token {top1:.1%}, KL {kl:.4f} nats a token, over {count} tokens")
        replies = answers(model, [turn.prompt for turn in turns], tokenizer.stop_ids, asked.tokens)
        said.append([tokenizer.decode(ids) for ids in replies])
    names = ["full weights", *(path.name for path in asked.models)]
    for turn, *each in zip(turns, *said, strict=True):
        print(f"## {turn.asked}\n")
        for name, text in zip(names, each, strict=True):
            print(f"[{name}] {text.strip()}\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
