"""Thinking budgets: a thought ends where its tokens are used, in every family's form, and nowhere else."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch
from tokenizers import AddedToken

from localq.chat.reply_stream import reply_decoder
from localq.engine.constraint import FREE, unpack_mask
from localq.sampling import Sampling
from localq.text import harmony, thinking
from localq.text.grammar import regex
from localq.text.thought_state import ThoughtState
from localq.text.thought_tags import PAIRS
from localq.text.tokenizer import Tokenizer
from localq.worker.thinking_budget import ThinkingBudget
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.text import tiny_tokenizers
from tests.support.worker.in_process_client import session_over

ALL = pytest.mark.parametrize("tags", PAIRS, ids=lambda tags: tags.opening)
GPT_OSS, MUSE = "<|start|><|channel|><|message|>", "<|start|><|message|> to=self"
SENTENCE = "Considering the limited time by the user, I have to give the solution based on the thinking directly now.\n"


def tokenizer_with(*pieces: str, special: bool = False, template: str = "", kind: str = "byte_level") -> Tokenizer:
    backend = getattr(tiny_tokenizers, kind)()
    backend.add_tokens([AddedToken(each, special=special, normalized=False) for each in pieces])
    return Tokenizer(backend, {}, template, frozenset())


def replied(tokenizer: Tokenizer, prompt: str, said: str, tokens: int, begun: str = "") -> tuple[list[int], int]:
    """Ids of a reply by a model that would say `said`, and how many were forced: after the end of the thought it says
    the rest of its words as if it had ended it itself."""
    ids, rows = tokenizer.encode(prompt + begun), 2 * tokenizer.vocab_size
    budget = ThinkingBudget(tokens, ThoughtState(tokenizer, ids, begun), tokenizer, rows)
    own, reply, before = tokenizer.encode(said), list[int](), FREE
    while own or budget.free() == 0:
        free = budget.free()
        assert free >= before - 1 or before == FREE  # what the engine has launched stays allowed
        if free == 0:
            (token,) = unpack_mask(budget.mask(), rows).nonzero().flatten().tolist()
        else:
            token = own.pop(0)
        before = free
        budget.accept(token)
        reply.append(token)
        if budget.forced and budget.free():
            break
    assert budget.free() == FREE or not budget.forced
    assert not budget.stopped
    return reply, budget.forced


def parts(tokenizer: Tokenizer, prompt: str, reply: list[int], begun: str = "") -> tuple[str, str, bool]:
    """Thought, answer, and whether the thought has not ended, as a front end reads the reply."""
    incoming = reply_decoder(tokenizer, tokenizer.encode(prompt + begun), begun=begun)
    for id in reply:
        incoming.push([id])
    incoming.finish()
    return incoming.thought, incoming.answer, incoming.thinking


@ALL
@pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("opens", [True, False], ids=["opened", "opens"])
@pytest.mark.parametrize("is_token", [True, False], ids=["token", "letters"])
def test_a_thought_ends_with_the_tag_of_its_family_when_the_budget_is_used(tags, special, opens, is_token):
    pieces = (tags.opening.removesuffix("thought"), tags.closing) if is_token else ()
    tokenizer = tokenizer_with(*pieces, special=special, template=f"{tags.opening}{tags.closing}")
    begin = f"{tags.opening}{tags.inside}"
    prompt, own = ("Q" + begin, "") if opens else ("Q", begin)
    if opens and len(tokenizer.encode(begin)) > thinking.TAIL_TOKENS:
        pytest.skip("no model writes so long a tag in letters")
    for tokens in (0, 1, 5, 20):
        reply, forced = replied(tokenizer, prompt, own + "so it may go on " * 9, tokens)
        thought, answer, is_open = parts(tokenizer, prompt, reply)
        assert forced > 0
        assert (answer, is_open) == ("", False)
        assert len(reply) - forced - len(tokenizer.encode(own)) in range(tokens - 1, tokens + 1)
        assert ("so it may go on " * 9).startswith(thought)
        text = tokenizer.decode(reply)
        assert text.endswith(tags.closing)
        assert text.count(tags.closing) == 1
        if tags.inside and tokens > 1:
            assert text.endswith(tags.inside + tags.closing)


@ALL
def test_a_thought_that_ends_by_itself_is_left_alone(tags):
    tokenizer = tokenizer_with(tags.opening.removesuffix("thought"), tags.closing)
    thought = "so it goes"
    tokens = len(tokenizer.encode(f"{tags.inside}{thought}{tags.inside}"))
    said = f"{tags.opening}{tags.inside}{thought}{tags.inside}{tags.closing}yes, " + "and so on " * 20
    reply, forced = replied(tokenizer, "Q", said, tokens + 1)
    assert (tokenizer.decode(reply), forced) == (said, 0)
    reply, forced = replied(tokenizer, "Q", said, tokens - 1)
    assert forced > 0
    plain = "no thought at all " * 9 + tags.opening
    assert replied(tokenizer, "Q", plain, 0) == (tokenizer.encode(plain), 0)


def test_budgets_of_random_replies_are_kept_to_the_token():
    source = random.Random(4)
    tokenizer = tokenizer_with("<think>", "</think>")
    words = ["so ", "süß", "今天", "👩‍👩‍👧‍👦", "\n", "<", "</", "think>", " "]
    for _ in range(300):
        said = "<think>" + "".join(source.choices(words, k=source.randrange(1, 30)))
        said += source.choice(["", "</think>yes"])
        tokens = source.randrange(12)
        reply, forced = replied(tokenizer, "Q", said, tokens)
        own = reply[: len(reply) - forced]
        assert own == tokenizer.encode(said)[: len(own)]
        thought, answer, is_open = parts(tokenizer, "Q", reply)
        assert "\ufffd" not in thought
        if forced:
            assert (answer, is_open) == ("", False)
            assert tokens <= len(own) - 1 <= tokens + 3  # a character is not cut
        else:
            assert len(tokenizer.encode(said.partition("</think>")[0])) - 1 <= tokens


@pytest.mark.parametrize("tokens", range(7))
def test_no_character_is_cut(tokens):
    tokenizer = tokenizer_with("<think>", "</think>")
    reply, _ = replied(tokenizer, "Q<think>", "今天👩天", tokens)
    thought, _, _ = parts(tokenizer, "Q<think>", reply)
    assert thought == "今天👩天"[: len(thought)]
    assert "\ufffd" not in tokenizer.decode(reply)


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram"])
def test_qwen_s_models_get_the_sentence_that_they_know(kind):
    tokenizer = tokenizer_with("<think>", "</think>", template="<think></think> last_query_index", kind=kind)
    reply, forced = replied(tokenizer, "Q<think>\n", "so it goes on and on", 3)
    text = tokenizer.decode(reply)
    assert text.endswith(SENTENCE + "</think>")
    assert text.count("\n\n") == 1
    assert forced > 10
    other = tokenizer_with("<think>", "</think>", template="<think></think>", kind=kind)
    assert "Considering" not in other.decode(replied(other, "Q<think>\n", "so it goes on and on", 3)[0])


def test_a_reply_that_is_continued_has_used_part_of_its_budget():
    tokenizer = tokenizer_with("<think>", "</think>")
    begun = "<think>\nso it goes"
    used = len(tokenizer.encode("so it goes"))
    for tokens, own in ((used + 3, 3), (used, 0), (1, 0)):
        reply, forced = replied(tokenizer, "Q", " on and on and on", tokens, begun)
        assert len(reply) - forced == own
        assert forced > 0
    over = f"{begun}\n</think>\n\nyes"
    assert replied(tokenizer, "Q", ", and <think> on", 0, over)[1] == 0


# ---- channels


def channel_tokenizer(template: str) -> Tokenizer:
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken(each, normalized=False) for each in harmony.MARKS])
    return Tokenizer(backend, {}, template, frozenset())


NEXT = {GPT_OSS: "<|end|><|start|>assistant", MUSE: "<|eom|><|start|>assistant"}
THOUGHT = {GPT_OSS: "<|channel|>analysis<|message|>", MUSE: " to=self<|message|>"}
ANSWER = {GPT_OSS: "<|channel|>final<|message|>", MUSE: " to=user<|message|>"}


def raw(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("template", [GPT_OSS, MUSE], ids=["gpt-oss", "muse"])
def test_a_message_of_thoughts_ends_and_the_answer_opens(template):
    tokenizer = channel_tokenizer(template)
    for tokens in (1, 4, 9):
        said = THOUGHT[template] + "so it may go on " * 9
        reply, forced = replied(tokenizer, "Q", said, tokens)
        own = len(tokenizer.encode(THOUGHT[template])) + tokens
        assert reply[: len(reply) - forced] == tokenizer.encode(said)[:own]
        assert raw(tokenizer, reply[-forced:]) == NEXT[template] + ANSWER[template]
        thought, answer, is_open = parts(tokenizer, "Q", [*reply, *tokenizer.encode("yes")])
        assert said.removeprefix(THOUGHT[template]).startswith(thought)
        assert (answer, is_open) == ("yes", False)


@pytest.mark.parametrize("template", [GPT_OSS, MUSE], ids=["gpt-oss", "muse"])
def test_a_budget_of_nothing_opens_the_answer_at_once(template):
    tokenizer = channel_tokenizer(template)
    reply, forced = replied(tokenizer, "Q", THOUGHT[template] + "so", 0)
    assert raw(tokenizer, reply) == ANSWER[template]
    assert forced == len(reply)


@pytest.mark.parametrize("template", [GPT_OSS, MUSE], ids=["gpt-oss", "muse"])
def test_messages_of_thoughts_share_the_budget_and_no_header_is_cut(template):
    tokenizer = channel_tokenizer(template)
    first, second = f"{THOUGHT[template]}one two", f"{NEXT[template]}{THOUGHT[template]}three four"
    answered = f"{first}{second}{NEXT[template]}{ANSWER[template]}yes"
    used = len(tokenizer.encode("one two")) + len(tokenizer.encode("three four"))
    assert replied(tokenizer, "Q", answered, used + 2) == (tokenizer.encode(answered), 0)
    for tokens in range(1, used):
        reply, forced = replied(tokenizer, "Q", answered, tokens)
        assert forced > 0
        text = raw(tokenizer, reply)
        assert text.endswith(NEXT[template] + ANSWER[template])
        assert not re.search(r"assistant[^|]*<\|e", text)
        assert parts(tokenizer, "Q", reply)[1:] == ("", False)
    plain = "no channel at all " * 4
    assert replied(tokenizer, "Q", plain, 1) == (tokenizer.encode(plain), 0)


# ---- a model

OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    """A chat with a random model whose prompt opens a thought, which it never ends; the tags are no tokens."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("thinker") / "tiny", dtype=torch.float32, initializer_range=0.15, vocab_size=320
    )
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": OPENED}))
    return session_over(folder)


@pytest.fixture
def session(thinker):
    thinker.clear()
    thinker.sampling, thinker.max_tokens, thinker.grammar, thinker.think_budget = Sampling(), 40, None, None
    return thinker


def asked(session):
    *_, reply = session.ask("Hi")
    return reply


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
def test_a_reply_of_a_real_engine_is_the_same_up_to_its_budget(session, sampling):
    session.sampling = sampling
    free = asked(session)
    assert (free.text, free.thought_stopped, free.stats.forced_tokens) == ("", False, 0)
    session.clear()
    session.think_budget = 12
    held = asked(session)
    ending = session.tokenizer.encode("\n</think>")
    assert held.thought_stopped
    assert held.stats.forced_tokens in (len(ending), len(ending) - 1)  # the thought may end a line
    assert held.stats.generated_tokens > 12 + len(ending)
    assert held.text
    assert free.thought.startswith(held.thought)
    assert held.notices[0] == "thinking stopped at the limit of 12 tokens (think_budget)"
    assert thinking.split_reply(session.messages[-1].content) == (held.thought, held.text)
    session.clear()
    session.think_budget = 2000
    assert asked(session).thought == free.thought


def test_the_answer_after_a_thought_that_was_stopped_keeps_to_its_grammar(session):
    session.grammar, session.think_budget = regex("(yes|no), [a-z]{3}"), 6
    for seed in range(4):
        session.clear()
        session.sampling = Sampling(temperature=1.5, seed=seed)
        reply = asked(session)
        assert re.fullmatch("(yes|no), [a-z]{3}", reply.text), reply.text
        assert reply.thought_stopped
        assert reply.reason == "stop"
