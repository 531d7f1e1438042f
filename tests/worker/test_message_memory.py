"""What encoding and decoding messages leaves in the process, which answers one reply after the other: nothing."""

from __future__ import annotations

import gc
import sys

import pytest

from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.sampling import LogitOptions, Sampling
from localq.stats import Stats, TokenLogprob
from localq.text.grammar import Grammar
from localq.worker import messages
from localq.worker.messages import Done, Generate, Load, Loaded, Progress, Tokens

TIMES, BLOCKS = 1000, 300  # free lists of dicts end at 80, those of tuples at 2,000 of a length
STATS = Stats(prompt_tokens=7, generated_tokens=3)
MESSAGES = {
    "Load": Load("path", LoadOptions("model")),
    "Generate": Generate(1, [1, 2], grammar=Grammar("gbnf", "root ::= [a-z]+"), logits=LogitOptions(((3, 1.0),))),
    "Progress": Progress(1, STATS),
    "Tokens": Tokens(1, [5, 6], STATS, [TokenLogprob(-0.5, ((5, -0.5), (6, -1.0)))]),
    "Done": Done(1, "stop", STATS),
    "Loaded": Loaded("model", "cpu", "CPU", "float32", "bf16", 100, 320, False, 0.0, {"weights": 8}, ["a note"]),
}


@pytest.mark.parametrize("message", MESSAGES.values(), ids=MESSAGES)
def test_messages_leave_nothing(message):
    line = messages.encode(message)
    assert messages.encode(messages.decode(line)) == line
    gc.collect()  # also empties the free lists: what is put there counts
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        for _ in range(TIMES):
            messages.decode(messages.encode(message))
        assert sys.getallocatedblocks() - before < BLOCKS
    finally:
        gc.enable()


@pytest.mark.parametrize("part", [object(), Sampling, {1}, b"bytes"], ids=["object", "a class", "set", "bytes"])
def test_only_fields_are_encoded(part):
    with pytest.raises(TypeError):
        messages.encode(messages.Failed({"cause": part}))


def test_a_nested_part_has_all_its_fields():
    back = messages.decode(messages.encode(MESSAGES["Tokens"]))
    assert isinstance(back, Tokens)
    assert back.stats == STATS
    with pytest.raises(LocalqError):
        messages.decode(messages.encode(MESSAGES["Done"]).replace(b"prompt_tokens", b"other_tokens"))
