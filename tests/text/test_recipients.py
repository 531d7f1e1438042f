"""Replies whose recipients decide what they are (Muse Glimmer): thoughts to itself, the answer to the user."""

from __future__ import annotations

import pytest

from localq.chat.reply_stream import ReplyDecoder, reply_decoder
from localq.chat.session import ChatSession
from localq.files.model_folder import ModelFiles
from localq.text import end_of_turn, harmony, thinking
from localq.text.thinking import ThoughtSplitter
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Load
from tests.support.chat.scripted_client import ScriptedClient
from tests.support.text import tiny_tokenizers

TEMPLATE = (
    "<|start|>system<|message|>Reasoning strength: {{ reasoning_strength | default('high') }}<|eot|>"
    "{% for m in messages %}<|start|>{{ m.role }}{{ ' to=user' if m.role == 'assistant' }}<|message|>{{ m.content }}"
    "<|eot|>{% endfor %}{# assistant to=self<|message|> thought <|eom|> #}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
CHANNELS = "<|start|> <|channel|> <|message|>"
REPLY = " to=self<|message|>so so<|eom|><|start|>assistant to=user<|message|>yes"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens(["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"])
    files = ModelFiles(tmp_path_factory.mktemp("model"), "safetensors", {}, {}, {}, TEMPLATE)
    return Tokenizer(backend, {}, TEMPLATE, end_of_turn.stop_ids(backend, {}, files))


def read(tokenizer: Tokenizer, text: str) -> ReplyDecoder:
    incoming = reply_decoder(tokenizer, tokenizer.chat_ids([{"role": "user", "content": "Q"}]))
    for id in tokenizer.encode(text):
        incoming.push([id])
    incoming.finish()
    return incoming


def test_the_end_of_a_turn_ends_a_reply_and_that_of_a_message_does_not(tokenizer):
    ends = {tokenizer.backend.id_to_token(id) for id in tokenizer.stop_ids}
    assert "<|eot|>" in ends
    assert "<|eom|>" not in ends


@pytest.mark.parametrize(
    ("reply", "thought", "answer"),
    [
        (REPLY, "so so", "yes"),
        (" to=user<|message|>yes", "", "yes"),
        ("<|message|>yes", "", "yes"),
        (" to=self<|message|>half", "half", ""),
        (" to=self<|message|>a<|eom|><|start|>assistant to=clock.now<|message|>b", "a\n\nb", ""),
    ],
)
def test_thought_and_answer_as_they_come_and_as_they_are_stored(tokenizer, reply, thought, answer):
    incoming = read(tokenizer, reply)
    assert (incoming.thought, incoming.answer) == (thought, answer)
    assert thinking.split_reply(incoming.raw) == (thought, answer)
    assert incoming.closing == (harmony.FINAL if "to=" not in reply else " to=user<|message|>")


CUT = {  # what the model writes -> (thought, answer)
    REPLY: ("so so", "yes"),
    f"{REPLY} to=self<|message|>": ("so so", "yes to=self<|message|>"),
    " to=self<|message|>a <| b < c": ("a <| b < c", ""),
    " to=self<|message|>a<|eom|><|start|>assistant to=self<|message|>b<|eom|><|start|>assistant to=us": ("a\n\nb", ""),
    " to=user<|message|>yes\n": ("", "yes\n"),
    "to=nobody, plain": ("", "to=nobody, plain"),
    " plain": ("", " plain"),
    " to": ("", " to"),
}


@pytest.mark.parametrize("raw", CUT)
def test_a_reply_is_split_alike_however_it_is_cut(raw):
    def streamed(*pieces: str) -> tuple[str, str]:
        splitter = ThoughtSplitter()
        parts = [*map(splitter.push, pieces), splitter.finish()]
        return "".join(thought for thought, _ in parts), "".join(answer for _, answer in parts)

    assert streamed(raw) == streamed(*raw) == CUT[raw]
    for at in range(len(raw)):
        assert streamed(raw[:at], raw[at:]) == CUT[raw]


def test_the_template_gets_the_answer_alone(tokenizer):
    client = ScriptedClient([tokenizer.encode(REPLY)], [tokenizer.encode(" to=user<|message|>no")])
    session = ChatSession(client, Load("path"), tokenizer)
    for question in ("x", "y <|eot|>"):
        list(session.ask(question))
    assert [each.answer for each in session.messages] == ["x", "yes", "y <|eot|>", "no"]
    prompt = tokenizer.backend.decode(client.generated[1].prompt, skip_special_tokens=False)
    assert "assistant to=user<|message|>yes<|eot|>" in prompt
    assert "so so" not in prompt
    assert "y <\u200b|eot|>" in prompt


def test_replies_change_their_form_between_families():
    assert thinking.convert_for(TEMPLATE, "<think>\nso so\n</think>\n\nyes") == REPLY
    assert thinking.convert_for(TEMPLATE, REPLY) == REPLY
    channels = "<|channel|>analysis<|message|>so so<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert thinking.convert_for(CHANNELS, REPLY) == channels
    assert thinking.convert_for(TEMPLATE, channels) == REPLY
    assert thinking.convert_for("a <think> b", REPLY) == "<think>\nso so\n</think>\n\nyes"
    assert thinking.convert_for(TEMPLATE, "yes") == " to=user<|message|>yes"


def test_levels_and_grammars():
    assert thinking.variables(TEMPLATE, "low") == {"reasoning_strength": "low"}
    assert thinking.minimal_variables(TEMPLATE) == {"reasoning_strength": "low"}
    assert harmony.answer_opening(TEMPLATE) == " to=user<|message|>"
    assert harmony.answer_opening(CHANNELS) == harmony.FINAL
    assert harmony.answer_opening("plain") == ""
