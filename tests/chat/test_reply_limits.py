"""The default length of an answer, and the guard that stops a reply which repeats itself."""

from __future__ import annotations

import json
import random
import re

import pytest

from localq.chat import reply_limits
from localq.chat.reply import check_complete
from localq.chat.reply_limits import ANSWER_TOKENS, OTHER, PROSE, LimitWatch, ReplyLimits, find_cycle
from localq.chat.reply_stream import ReplyDecoder
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.settings import DESCRIPTIONS, NO_LIMIT
from localq.text.grammar import Grammar
from tests.support.chat.scripted_client import CharTokenizer, session_over, streamed

WORDS = re.findall(r"\w+", "the ship left port at dawn and no one on the quay saw which way it turned")


def chat(*scripts: list[str], reason: str = "stop", max_tokens: int | None = None) -> ChatSession:
    session = session_over(*scripts, context_size=100_000, reason=reason)
    session.max_tokens = max_tokens
    return session


def prose(letters: int, seed: int = 0) -> str:
    """Text that does not repeat."""
    choices, text = random.Random(seed), ""
    while len(text) < letters:
        text += f"{choices.choice(WORDS)} "
    return text[:letters]


# ---- the default length


def test_an_answer_ends_at_the_default_length_and_continue_goes_on():
    session = chat([prose(ANSWER_TOKENS + 50)], ["end."])
    text, reply, told = streamed(session.ask("Tell a long story."))
    assert text == reply.text == prose(ANSWER_TOKENS + 50)[:ANSWER_TOKENS]
    assert (reply.reason, reply.stats.generated_tokens) == ("default_length", ANSWER_TOKENS)
    assert told == [
        "stopped at the default limit of 4,096 tokens; /continue resumes, and /set max_tokens changes the limit"
    ]
    assert session.client.cancelled.is_set()
    assert not session.messages[-1].complete
    _, reply, told = streamed(session.continue_reply())
    assert reply.text == text + "end."
    assert (reply.reason, told) == ("stop", [])


@pytest.mark.parametrize("size", [1, 7, 64, 5000])
def test_where_it_ends_does_not_depend_on_how_tokens_arrive(size):
    text = f"<think>{prose(6000)}</think>{prose(5000, 1)}"
    session = chat([text[at : at + size] for at in range(0, len(text), size)])
    _, reply, _ = streamed(session.ask("x"))
    assert (len(reply.thought), reply.reason) == (len(prose(6000).rstrip()), "default_length")
    # the tag is recognized at its last letter, so the others count, and the one that ends the thought
    assert reply.text == prose(5000, 1)[: ANSWER_TOKENS - len("<think>")]


def test_an_answer_of_exactly_that_length_is_whole():
    session = chat([prose(ANSWER_TOKENS)])
    _, reply, told = streamed(session.ask("x"))
    assert (len(reply.text), reply.reason, told) == (ANSWER_TOKENS, "stop", [])


@pytest.mark.parametrize("most", [5000, NO_LIMIT])
def test_max_tokens_replaces_it(most):
    session = chat([prose(5000)], max_tokens=most)
    _, reply, _ = streamed(session.ask("x"))
    assert (len(reply.text), reply.reason) == (5000, "stop")
    assert session.client.generated[0].max_tokens == most


def test_a_full_context_is_named_where_it_comes_first():
    session = chat([prose(300)], reason="context")
    assert streamed(session.ask("x"))[1].reason == "context"


def test_an_answer_by_a_grammar_that_is_cut_there_is_an_error():
    session = chat([f'{{"a": "{prose(5000)}'])
    session.grammar = Grammar("json_schema", "{}")
    _, reply, _ = streamed(session.ask("x"))
    with pytest.raises(LocalqError, match="cut after 4096 tokens; the answer does not match the JSON schema"):
        check_complete(reply)


# ---- the loop guard

LOOPS = {  # block -> what comes before it
    "a sentence": ("And so it goes on. ", prose(700)),
    "a word": ("the ", prose(300)),
    "a letter": ("a", ""),
    "a paragraph": (prose(220, 3) + "\n\n", prose(2000)),
    "a long section": (prose(900, 4), prose(100)),
    "another script": ("今天天气很好。", "你好"),
    "a list whose items are all the same": ("- to do\n", "Here is a list:\n\n"),
    "after a code block": ("I hope this helps! ", "```c\nint a;\n```\n\n"),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("in_thought", [False, True])
def test_prose_that_repeats_is_stopped(name, in_thought):
    block, before = LOOPS[name]
    text = before + block * (9000 // len(block))
    whole = f"<think>{text}" if in_thought else text
    session = chat([whole[at : at + 9] for at in range(0, len(whole), 9)], max_tokens=None if in_thought else NO_LIMIT)
    _, reply, told = streamed(session.ask("x"))
    assert reply.reason == "repetition"
    kept = reply.thought if in_thought else reply.text
    repeated = len(kept) - len(before)
    needed = max(PROSE.tokens, PROSE.blocks * len(block))
    assert needed - len(block) <= repeated <= needed + 2 * len(block) + 2 * reply_limits.CHECK_EVERY
    assert f"stopped: the last {len(block)} tokens were repeated" in told[-1]
    assert "/set loop_guard off disables this check" in told[-1]
    assert ("while the model was thinking" in told[-1]) == in_thought
    assert not session.messages[-1].complete


def rows(count: int, row: str) -> str:
    return "".join(row.replace("#", str(number)) for number in range(count))


LEGITIMATE = {
    "a numbered list": rows(400, "#. Buy milk and bread\n"),
    "a table whose rows differ by their number": "| n | state |\n| --- | --- |\n" + rows(400, "| # | yes |\n"),
    "an empty table": "| a | b | c |\n" + "| | | |\n" * 300,
    "a table of the same row": "| yes | no | yes |\n" * 150,
    "zeros in C": "```c\nuint8_t lut[256] = {" + "0x00, " * 256 + "};\n```",
    "an identity matrix": "[\n"
    + "".join(f"[{', '.join('10'[i != j] for j in range(24))}],\n" for i in range(24))
    + "]",
    "a grid of zeros": "```python\n[" + f"[{', '.join('0' * 32)}],\n" * 32 + "]\n```",
    "zeros outside a code block": f"[{', '.join('0' * 32)}],\n" * 32,
    "a hex dump": rows(120, "#0: 00 00 00 00 00 00 00 00\n"),
    "base64 of zeros": "A" * 1400,
    "a rule of dashes": "-" * 2000,
    "code of the same line": "```\n" + "push(stack, NULL);\n" * 150 + "```",
    "a line a hundred times, as was asked": "I will not talk in class.\n" * 58,
    "a chorus between verses": "".join(prose(160, n) + "La la la, the sea is wide.\n" * 4 for n in range(16)),
    "a table of test cases": rows(200, "test_add_#(1, 2, 3)\n"),
    "dots of a table of contents": rows(40, "Chapter # " + ". " * 30 + "#\n"),
    "counting": " ".join(map(str, range(1000))),
}


@pytest.mark.parametrize("name", LEGITIMATE)
def test_tables_lists_and_code_are_not_stopped(name):
    """One token a letter here: with a real vocabulary each of these is a half to a fourth as long."""
    text = LEGITIMATE[name] + " Done."
    session = chat([text], max_tokens=NO_LIMIT)
    _, reply, told = streamed(session.ask("x"))
    assert (reply.text, reply.reason, told) == (text, "stop", [])


def test_code_digits_and_signs_are_stopped_where_they_never_end():
    for text in ("```\n" + "x = 0\n" * 3000, "0, " * 4000, "!" * 9000):
        session = chat([text], max_tokens=NO_LIMIT)
        _, reply, _ = streamed(session.ask("x"))
        assert reply.reason == "repetition"
        assert OTHER.tokens <= len(reply.text) <= OTHER.tokens + 200


def test_a_repetition_that_changes_is_none():
    choices = random.Random(5)
    text = "".join(f"And so it goes on, {choices.choice(WORDS)}. " for _ in range(300))
    session = chat([text], max_tokens=NO_LIMIT)
    assert streamed(session.ask("x"))[1].reason == "stop"


def test_a_list_in_json_is_judged_by_what_repeats():
    """An embedded model filled the list of a crew with one name; a matrix of zeros is longer."""
    for item, reason in (('"Gabriella",\n    ', "repetition"), ("0, ", "default_length")):
        session = chat(['{"crew": [' + item * 2000])
        session.grammar = Grammar("json_schema", "{}")
        _, reply, _ = streamed(session.ask("x"))
        assert reply.reason == reason
        cause = "stopped because of repetition" if reason == "repetition" else "cut after 4096"
        with pytest.raises(LocalqError, match=cause):
            check_complete(reply)


def test_the_guard_can_be_switched_off():
    session = chat(["the " * 2000], max_tokens=NO_LIMIT)
    session.loop_guard = False
    assert streamed(session.ask("x"))[1].reason == "stop"


def test_outside_a_chat_the_notices_name_options():
    for text, said in (
        ("the " * 2000, "--no-loop-guard disables this check"),
        (prose(5000), "change it with -n TOKENS or -n max"),
    ):
        session = chat([text])
        session.in_chat = False
        assert streamed(session.ask("x"))[2][0].endswith(said)


def test_continue_goes_on_after_a_repetition():
    session = chat(["the " * 2000], ["quay."])
    first = streamed(session.ask("x"))[1]
    assert streamed(session.continue_reply())[1].text == first.text + "quay."


# ---- find_cycle against its definition


def test_a_cycle_is_the_longest_end_that_repeats():
    choices = random.Random(11)
    for _ in range(60):
        period = choices.choice([1, 2, 3, 7, 50, 255, 300])
        block = [choices.randrange(5) for _ in range(period)]
        tokens = choices.randrange(1200, 4000)
        ids = (
            [choices.randrange(5) for _ in range(choices.randrange(300))]
            + [9]
            + (block * (tokens // period + 1))[:tokens]
        )
        found = find_cycle(ids)
        smallest = next(p for p in range(1, tokens + 1) if ids[-tokens:][p:] == ids[-tokens:][:-p] or p == tokens)
        if tokens >= PROSE.tokens and tokens >= PROSE.blocks * smallest:
            assert found is not None
            assert (found.period, found.tokens) == (smallest, tokens)
        else:
            assert found is None or found.tokens >= PROSE.tokens


def test_settings_of_a_conversation_keep_the_guard(tmp_path):
    from localq.chat.history.record import ChatSettings
    from localq.sampling import Sampling

    assert ChatSettings.from_dict({"sampling": {}, "max_tokens": None, "stop": []}).loop_guard
    body = json.loads(json.dumps({"sampling": {}, "max_tokens": NO_LIMIT, "stop": [], "loop_guard": False}))
    assert ChatSettings.from_dict(body) == ChatSettings(Sampling(), NO_LIMIT, loop_guard=False)


def test_a_watch_without_limits_ends_nothing():
    watch = LimitWatch(ReplyLimits(), CharTokenizer().decode)
    decoder = ReplyDecoder(CharTokenizer())
    for letter in "the " * 3000:
        assert not watch.is_full()
        decoder.push([ord(letter)])
        watch.count(decoder)
    assert watch.reason == ""


def test_the_help_of_the_setting_states_the_default_length() -> None:
    assert f"unset = {ANSWER_TOKENS} answer tokens" in DESCRIPTIONS["max_tokens"]
