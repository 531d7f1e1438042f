"""What a grammar costs per token on the CPU: `python -m tests.tools.mask_cost`.

SmolLM2's vocabulary, and one of 151,936 tokens made of it (its tokens, and pairs of them, as long as Qwen's are). Each
grammar follows a text that keeps to it; the time is the processor's, for the mask and for taking the token in.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

from tokenizers import Tokenizer, models

from localq.files.model_folder import open_model
from localq.text import grammar
from localq.text.grammar import Grammar
from localq.text.tokenizer import Tokenizer as ModelTokenizer
from localq.worker.token_masks import GrammarConstraint, Vocabulary
from tests.support.files.real_model import smollm2

LARGE = 151_936
ITEMS = [
    {"name": f"Ship number {n}", "crew": 7 * n, "tags": ["old", "Žlutý kůň"], "note": "She sails at noon."}
    for n in range(12)
]
JSON_GBNF = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)*)? ws "}"
array ::= "[" ws (value (ws "," ws value)*)? ws "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? [0-9]+ ("." [0-9]+)?
ws ::= [ \n]{0,20}
"""
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "crew": {"type": "integer", "minimum": 0},
            "tags": {"type": "array", "items": {"type": "string"}},
            "note": {"type": "string"},
        },
        "required": ["name", "crew", "tags", "note"],
        "additionalProperties": False,
    },
}


def large(small: Tokenizer) -> Tokenizer:
    """`small` with pairs of its common tokens as further tokens."""
    body = json.loads(small.to_str())
    vocabulary = dict(body["model"]["vocab"])
    ordered = sorted(vocabulary, key=vocabulary.__getitem__)
    for pair in itertools.product(ordered[1000:2000], ordered[300:1500]):
        if len(vocabulary) == LARGE:
            break
        vocabulary.setdefault("".join(pair), len(vocabulary))
    body["model"] = json.loads(models.BPE(vocab=vocabulary, merges=[]).__getstate__())
    return Tokenizer.from_str(json.dumps(body))


def costs(wanted: Grammar, vocabulary: Vocabulary, text: str) -> list[float]:
    """Microseconds of every token of `text`."""
    constraint, spent = GrammarConstraint(wanted, vocabulary), []
    for id in vocabulary.tokens.greedy_tokenize(text):
        started = time.thread_time()
        constraint.mask()
        constraint.accept(id)
        spent.append((time.thread_time() - started) * 1e6)
    return spent


def main() -> None:
    small = ModelTokenizer.load(open_model(smollm2())).backend
    text = json.dumps(ITEMS, ensure_ascii=False)
    grammars = {
        "schema": grammar.json_schema(json.dumps(SCHEMA)),
        "any JSON": grammar.json_schema("json"),
        "regex": grammar.regex(r"(?s)\[.*\]"),
        "GBNF": grammar.grammar(JSON_GBNF),
    }
    for name, backend in (("49,152 tokens", small), (f"{LARGE:,} tokens", large(small))):
        started = time.thread_time()
        vocabulary = Vocabulary(backend, backend.get_vocab_size(with_added_tokens=True), [2])
        print(f"{name}: {time.thread_time() - started:.2f} s to take in the vocabulary; us per token, median and p99:")
        for kind, wanted in grammars.items():
            spent = sorted(costs(wanted, vocabulary, text))
            median, high = statistics.median(spent), spent[int(0.99 * len(spent))]
            print(f"  {kind:9} {median:7.0f} {high:7.0f}  ({len(spent)} tokens)")


if __name__ == "__main__":
    main()
