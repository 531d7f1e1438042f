"""Thoughts between the tags of all families: split, stored, continued and given to the templates of other models."""

from __future__ import annotations

import itertools
import random

import pytest
from tokenizers import AddedToken

from localq.chat.history.conversation import Message
from localq.chat.reply_stream import ReplyDecoder, reply_decoder
from localq.text import harmony, template, thinking, thought_tags
from localq.text.thinking import ThoughtSplitter
from localq.text.thought_tags import PAIRS, Tags
from localq.text.tokenizer import Tokenizer
from tests.support.text import tiny_tokenizers

ALL = pytest.mark.parametrize("tags", PAIRS, ids=lambda tags: tags.opening)


def streamed(pieces: list[str], opened: str = "") -> tuple[str, str, str]:
    """(thought, answer, raw) of a reply that comes in `pieces`."""
    splitter = ThoughtSplitter(opened, channels=False)
    parts = [*map(splitter.push, pieces), splitter.finish()]
    thought, answer = ("".join(part[kind] for part in parts) for kind in (0, 1))
    return thought, answer, splitter.head + answer


def chat_template(tags: Tags, opens: bool = False) -> str:
    """A template that writes replies as they are, between marks, and mentions the tags."""
    end = tags.opening + "\\n" if opens else ""
    return (
        "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}{% endfor %}"
        f"{{# {tags.opening} {tags.closing} #}}"
        "{% if add_generation_prompt %}" + f"{{{{ '<|turn|>assistant {end}' }}}}" + "{% endif %}"
    )


def tokenizer_with(*pieces: str, special: bool = True, text: str | None = None) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_tokens([AddedToken(each, special=special, normalized=False) for each in pieces])
    return Tokenizer(backend, {}, text, frozenset())


@ALL
def test_a_reply_is_split_alike_however_it_is_cut(tags):
    raw = f"{tags.opening}\nso < [so</\n{tags.closing}\n\nyes {tags.closing} {tags.opening}"
    expected = ("so < [so</", f"yes {tags.closing} {tags.opening}", raw)
    assert streamed([raw]) == streamed(list(raw)) == expected
    assert thinking.split_reply(raw) == expected[:2]
    for at in range(len(raw)):
        assert streamed([raw[:at], raw[at:]]) == expected
    assert streamed([tags.opening[:-1]]) == ("", tags.opening[:-1], tags.opening[:-1])
    assert streamed([f"see {tags.opening}"]) == ("", f"see {tags.opening}", f"see {tags.opening}")


@ALL
def test_random_texts_are_split_alike_however_they_are_cut(tags):
    random_source = random.Random(7)
    words = [
        tags.opening,
        tags.closing,
        "<",
        "[",
        "/",
        "think",
        "|",
        ">",
        "\n",
        " ",
        "so",
        *(each.opening for each in PAIRS),
    ]
    for _ in range(300):
        raw = "".join(random_source.choices(words, k=random_source.randrange(10)))
        cuts = sorted(random_source.choices(range(len(raw) + 1), k=4))
        pieces = [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)])]
        assert streamed(pieces) == streamed([raw])
        assert streamed(pieces)[2] == raw
        assert thinking.split_reply(thinking.close_thought(raw))[1].strip() == thinking.split_reply(raw)[1].strip()


@ALL
@pytest.mark.parametrize("special", [True, False])
def test_tags_are_text_whatever_the_tokenizer_calls_them(tags, special):
    opening = tags.opening.removesuffix("thought")  # Gemma 4 has a token for what stands before the word
    tokenizer = tokenizer_with(opening, tags.closing, "<|END_TEXT|>", "<|START_TEXT|>", special=special)
    ids = tokenizer.encode(f"{tags.opening}\nab\n{tags.closing}<|START_TEXT|>c<|END_TEXT|>")
    assert tokenizer.decode(ids) == f"{tags.opening}\nab\n{tags.closing}c"
    incoming = ReplyDecoder(tokenizer.stream())
    pieces = [piece for id in ids for piece in incoming.push([id])] + incoming.finish()
    assert "".join(text for text, thinks in pieces if thinks) == incoming.thought == "ab"
    assert "".join(text for text, thinks in pieces if not thinks) == incoming.answer == "c"
    assert incoming.raw == f"{tags.opening}\nab\n{tags.closing}c"
    assert incoming.closing == tags.closing


def test_tags_of_an_unknown_kind_are_not_left_out():
    tokenizer = tokenizer_with("<|my_thoughts|>", "<|/my_thoughts|>", "<REASONING>", "<|turn|>")
    text = "<|my_thoughts|>hm<|/my_thoughts|>A <REASONING>!"
    assert tokenizer.decode(tokenizer.encode(f"{text}<|turn|>")) == text


@ALL
def test_a_thought_that_the_prompt_opens_or_leaves_empty(tags):
    opening = tags.opening.removesuffix("thought")
    tokenizer = tokenizer_with(opening, tags.closing, text=chat_template(tags, opens=True))
    prompt = tokenizer.chat_ids([{"role": "user", "content": "Q"}])
    incoming = reply_decoder(tokenizer, prompt)
    assert incoming.thinking
    incoming.push(tokenizer.encode(f"hm{tags.closing}yes"))
    incoming.finish()
    assert (incoming.thought, incoming.answer) == ("hm", "yes")
    assert thinking.split_reply(incoming.raw) == ("hm", "yes")
    empty = f"<a>{tags.opening}\n{tags.closing}\n"
    assert thinking.thought_opening(empty) == ""
    assert thinking.continue_prompt(empty, f"{tags.opening}x") == f"<a>{tags.opening}x"
    assert thinking.continue_prompt(empty, "yes") == f"{empty}yes"
    opened = f"<a>{tags.opening}\n"
    assert thinking.continue_prompt(opened, f"{tags.opening}x") == f"<a>{tags.opening}x"
    assert thinking.continue_prompt(opened, "yes") == f"{opened}{tags.ending}yes"


@ALL
def test_a_template_gets_the_tags_as_they_are_and_marks_escaped(tags):
    text = chat_template(tags)
    tokenizer = tokenizer_with("<|turn|>", text=text)
    raw = f"{tags.opening}{tags.inside}a <|turn|> b{tags.ending}yes <|turn|> {tags.closing}"
    told = thinking.template_content(tokenizer, "assistant", raw)
    assert told.startswith(f"{tags.opening}{tags.inside}a <\u200b|turn|> b{tags.ending}yes <\u200b|turn|> ")
    assert thinking.escape_reply(raw, tokenizer.turn_marks) == told
    asked = f"what is <|turn|> and {tags.closing}?"
    assert "<|turn|>" not in thinking.template_content(tokenizer, "user", asked)
    said = [Message("user", "Q"), Message("assistant", raw)]
    rendered = template.render(text, [each.to_dict(tokenizer) for each in said], {})
    assert rendered.count(tags.opening) == 1
    cut = f"{tags.opening}{tags.inside}half"
    assert thinking.template_content(tokenizer, "assistant", cut) == cut + tags.ending


@pytest.mark.parametrize(("first", "second"), [*itertools.permutations(PAIRS, 2)], ids=lambda tags: tags.opening)
def test_a_reply_of_one_family_goes_to_a_template_of_another(first, second):
    raw = f"{first.opening}{first.inside}hm{first.ending}yes"
    converted = thinking.convert_for(chat_template(second), raw)
    assert converted == f"{second.opening}{second.inside}hm{second.ending}yes"
    assert thinking.convert_for(chat_template(second), converted) == converted
    assert thinking.convert_for("no tags", raw) == raw
    half = thinking.convert_for(chat_template(second), f"{first.opening}half")
    assert half == f"{second.opening}{second.inside}half"
    assert thinking.split_reply(half) == ("half", "")


@ALL
def test_a_reply_goes_to_channels_and_back(tags):
    channels = harmony.START + harmony.CHANNEL + harmony.MESSAGE
    there = thinking.convert_for(channels, f"{tags.opening}hm{tags.closing}yes")
    assert thinking.split_reply(there) == ("hm", "yes")
    assert harmony.begins_reply(there) is True
    assert thinking.convert_for(chat_template(tags), there) == f"{tags.opening}{tags.inside}hm{tags.ending}yes"


@ALL
def test_a_model_that_always_thinks_can_be_told_to(tags):
    assert thinking.variables(chat_template(tags), "on") == {}
    assert thought_tags.of_template(chat_template(tags)) is tags
