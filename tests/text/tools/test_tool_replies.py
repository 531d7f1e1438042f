"""Replies with tools token by token: marks that are special tokens, thoughts before calls, channels, stop strings."""

from __future__ import annotations

import json
import random

import pytest
from tokenizers import AddedToken

from localq.chat.reply import Reply, ReplyPiece
from localq.chat.reply_limits import NO_LIMITS
from localq.chat.reply_stream import ReplyDecoder, reply_decoder, stream
from localq.sampling import Sampling
from localq.text import harmony
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Generate
from tests.support.chat.scripted_client import ScriptedClient
from tests.support.text import tiny_tokenizers
from tests.support.text.tool_calls import FORMATS, IN_TEXT, TOOLS, WRITERS, Call, random_call

PARIS: list[Call] = [("get_weather", {"city": "Paris <|x|>"})]
CHANNELS = "<|start|> <|channel|> <|message|>"
RECIPIENTS = "<|start|> <|message|> to=self"


def tokenizer_of(name: str, special: bool = True) -> Tokenizer:
    """A tokenizer in which the marks of a format are tokens."""
    backend = tiny_tokenizers.byte_level()
    marks = harmony.MARKS if name in ("harmony", "atem") else FORMATS[name].marks
    tokens = [AddedToken(mark, normalized=False, special=special) for mark in (*marks, "<think>", "</think>")]
    backend.add_special_tokens(tokens) if special else backend.add_tokens(tokens)
    template = {"harmony": CHANNELS, "atem": RECIPIENTS}.get(name, "{{ messages }}")
    return Tokenizer(backend, {}, template, frozenset({backend.token_to_id("</s>")}))


def read(name: str, text: str, tokenizer: Tokenizer | None = None, stops: tuple[str, ...] = ()) -> ReplyDecoder:
    tokenizer = tokenizer or tokenizer_of(name)
    made = reply_decoder(tokenizer, tokenizer.encode("Q"), stops, tools=FORMATS[name].stream(TOOLS))
    for id in tokenizer.encode(text):
        made.push([id])
    made.finish()
    return made


def calls_of(made: ReplyDecoder) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in made.calls]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", [each for each in IN_TEXT if each != "atem"])
def test_marks_that_are_tokens_are_read_behind_a_thought(name, special):
    tokenizer = tokenizer_of(name, special)
    call = WRITERS[name](PARIS)
    made = read(name, f"<think>\nI may write {call}\n</think>\n\nSo:\n{call}", tokenizer)
    assert made.thought == f"I may write {call}" or special
    assert (made.answer, calls_of(made)) == ("So:", PARIS)
    assert made.written.endswith(call)
    assert made.take_calls() == made.calls
    assert made.take_calls() == ()


@pytest.mark.parametrize("name", [each for each in IN_TEXT if each != "atem"])
def test_without_tools_a_reply_is_what_it_was(name):
    tokenizer = tokenizer_of(name)
    text = f"So: {WRITERS[name](PARIS)}"
    made = reply_decoder(tokenizer, tokenizer.encode("Q"))
    made.push(tokenizer.encode(text))
    made.finish()
    assert made.calls == ()
    assert made.answer == tokenizer.decode(tokenizer.encode(text))


def test_random_calls_of_tokens_are_read_as_they_were_meant():
    draw = random.Random(5)
    for name in IN_TEXT:
        tokenizer = tokenizer_of(name)
        for _ in range(10):
            calls = [random_call(draw) for _ in range(draw.randrange(1, 3))]
            text = WRITERS[name](calls)
            if name == "atem":
                text = f" to=user<|message|>{text}"
            assert calls_of(read(name, text, tokenizer)) == calls


def test_a_stop_string_in_a_call_breaks_it_off():
    made = read("hermes", WRITERS["hermes"](PARIS) + "and", stops=("Paris",))
    assert made.calls == ()
    assert made.answer == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'


# ---- gpt-oss

THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
ARGUMENTS = '{"city": "Paris"}'
HEADERS = [
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
    " to=functions.get_weather<|channel|>commentary json<|message|>",
    "<|channel|>commentary to=functions.get_weather<|message|>",
    "<|channel|>analysis to=functions.get_weather code<|message|>",
]
CITY: list[Call] = [("get_weather", {"city": "Paris"})]
REPLIES = {  # reply -> thought, answer, calls
    **{THOUGHT + header + ARGUMENTS: ("hm", "", CITY) for header in HEADERS},
    **{f"{header}{ARGUMENTS}<|call|>": ("", "", CITY) for header in HEADERS},
    HEADERS[0] + ARGUMENTS: ("", "", CITY),
    f"{THOUGHT}<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant{HEADERS[0]}{ARGUMENTS}": (
        "hm\n\nLet me look.", "", CITY,
    ),
    f"{HEADERS[0]}{ARGUMENTS}<|call|><|start|>assistant{HEADERS[1]}{{}}": ("", "", [*CITY, ("get_weather", {})]),
    f"{THOUGHT}<|channel|>final<|message|>It is <|x|> {{}}<|return|>": ("hm", "It is <|x|> {}", []),
    f"{HEADERS[0]}{{\"city\": \"Pa": ("", '{"city": "Pa', []),
    f"{HEADERS[0]}{{\"city\": \"<|x|> < <| |>\"}}": ("", "", [("get_weather", {"city": "<|x|> < <| |>"})]),
    "<|channel|>commentary to=functions.ping<|message|>": ("", "", [("ping", {})]),
    "<|channel|>commentary to=python<|message|>{}": ("", "", [("python", {})]),
    "<|channel|>commentary to=browser.open<|message|>{}": ("", "{}", []),
    "<|channel|>commentary to=functions.get_wea": ("", "", []),
    f"<|channel|>final<|message|>yes<|end|><|start|>assistant{HEADERS[0]}{ARGUMENTS}": ("", "yes", CITY),
    "plain text": ("", "plain text", []),
}  # fmt: skip


@pytest.mark.parametrize("text", REPLIES)
def test_calls_of_gpt_oss_come_out_of_their_channel(text):
    tokenizer = tokenizer_of("harmony")
    made = read("harmony", text, tokenizer)
    assert (made.thought, made.answer, calls_of(made)) == REPLIES[text]
    whole = reply_decoder(tokenizer, tokenizer.encode("Q"), tools=FORMATS["harmony"].stream(TOOLS))
    whole.push(tokenizer.encode(text))
    whole.finish()
    assert (whole.thought, whole.answer, calls_of(whole)) == REPLIES[text]


def test_text_that_only_looks_like_marks_of_channels_stays_text():
    tokenizer = tokenizer_of("harmony")
    made = reply_decoder(tokenizer, tokenizer.encode("Q"), tools=FORMATS["harmony"].stream(TOOLS))
    said = f"As {HEADERS[0]}{{}}<|call|>"
    plain = [id for char in said for id in tokenizer.encode(char)]
    made.push([*tokenizer.encode("<|channel|>final<|message|>"), *plain])
    made.finish()
    assert (made.answer, made.calls) == (said, ())


# ---- Muse Glimmer

INVOKE = WRITERS["atem"](CITY)
PING = WRITERS["atem"]([("ping", {})])
MUSE = {
    f" to=self<|message|>hm<|eom|><|start|>assistant to=get_weather<|message|>{INVOKE}": ("hm", "", CITY),
    f" to=get_weather<|message|>{INVOKE}<|eom|><|start|>assistant to=ping<|message|>{PING}": (
        "", "", [*CITY, ("ping", {})],
    ),
    f" to=user<|message|>Let me see.<|eom|><|start|>assistant to=get_weather<|message|>{INVOKE}": (
        "", "Let me see.", CITY,
    ),
    f" to=user<|message|>{INVOKE}": ("", "", CITY),
    f" to=get_weather.get_weather<|message|>{INVOKE}": ("", "", CITY),
    f" to=get_weather<|message|>{INVOKE[:-40]}": ("", INVOKE[:-40], []),
    " to=user<|message|>1 < 2 <|": ("", "1 < 2 <|", []),
}  # fmt: skip


@pytest.mark.parametrize("text", MUSE)
def test_calls_of_muse_come_from_their_recipient(text):
    made = read("atem", text)
    assert (made.thought, made.answer, calls_of(made)) == MUSE[text]


# ---- a stream of pieces


@pytest.mark.parametrize("name", ["hermes", "qwen", "harmony", "gemma"])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_stream_gives_calls_as_soon_as_they_are_whole(name, size):
    tokenizer = tokenizer_of(name)
    calls = [*CITY, ("ping", {})]
    text = WRITERS[name](calls)
    ids = tokenizer.encode(text if name == "harmony" else f"Look.\n{text}")
    groups = [ids[at : at + size] for at in range(0, len(ids), size)]
    client = ScriptedClient(groups, context_size=10_000)
    request = Generate("1", [1], Sampling(), 1000)
    into = reply_decoder(tokenizer, [1], tools=FORMATS[name].stream(TOOLS))
    *pieces, reply = stream(client, request, into, False, NO_LIMITS, tokenizer.decode)
    assert isinstance(reply, Reply)
    given = [each for piece in pieces if isinstance(piece, ReplyPiece) for each in piece.calls]
    assert tuple(given) == reply.calls
    assert reply.notices == ()
    assert [(call.name, json.loads(call.arguments)) for call in given] == calls
    assert reply.text == "".join(piece.text for piece in pieces if isinstance(piece, ReplyPiece))
    assert reply.text == ("" if name == "harmony" else "Look.")
    if size == 1 and name != "harmony":
        places = [at for at, piece in enumerate(pieces) if isinstance(piece, ReplyPiece) and piece.calls]
        assert places[0] < len(pieces) - 8
