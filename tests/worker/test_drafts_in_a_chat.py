"""Whole chats with drafts: grammars, thinking budgets, stop strings, other versions of a reply. Texts stay the same."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.engine.draft import policy
from localq.engine.generate import Engine
from localq.sampling import Sampling
from localq.text.grammar import Grammar, grammar, json_schema, regex
from localq.worker.token_masks import GrammarConstraint, Vocabulary
from tests.support.engine.draft_models import save_draft
from tests.support.engine.lossless import EagerTimes
from tests.support.engine.mtp_models import save_mtp
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.text.tiny_tokenizers import byte_level
from tests.support.worker.in_process_client import session_over

SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "last_name": {"type": "string", "maxLength": 8},
        "languages_spoken": {"type": "array", "items": {"enum": ["german", "french"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "languages_spoken", "ok"],
    "additionalProperties": False,
}
GRAMMARS: dict[str, Grammar | None] = {
    "none": None,
    "schema": json_schema(json.dumps(SCHEMA)),
    "json": json_schema("{}"),
    "lark": grammar('start: "BEGIN OF THE LIST\\n" (/[a-f]{1,3}/ ", and then "){2,5} "END OF THE LIST"'),
    "regex": regex("(the cat sat on the mat, ){3}[a-z]{1,5}"),
}
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SAMPLINGS = {
    "greedy": Sampling(),
    "T 1": Sampling(temperature=1.0, seed=3),
    "all": Sampling(temperature=0.8, repeat_penalty=1.2, dry_multiplier=0.5, xtc_probability=0.4, top_k=30, seed=5),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", initializer_range=0.15)


@pytest.fixture(scope="module")
def thinkers(tmp_path_factory) -> list[ChatSession]:
    """The same with a model whose prompt opens a thought, which it never ends; the tags are no tokens.

    A third one drafts with the model itself.
    """
    folder = make_checkpoint(tmp_path_factory.mktemp("thinker") / "tiny", initializer_range=0.15, vocab_size=320)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": OPENED}))
    modelled = session_over(folder, draft_tokens=7, draft=folder)
    engine_of(modelled)._drafter.times = EagerTimes()
    return [*both(folder), modelled]


@pytest.fixture(scope="module")
def sessions(folder) -> list[ChatSession]:
    """Without drafts, and with drafts wherever there are any."""
    return both(folder)


@pytest.fixture(scope="module")
def modelled(folder, tmp_path_factory) -> ChatSession:
    """With a draft model that is right at times."""
    draft = save_draft("near", folder, tmp_path_factory.mktemp("draft") / "near")
    session = session_over(folder, draft_tokens=7, draft=draft)
    engine_of(session)._drafter.times = EagerTimes()
    return session


def both(folder: Path) -> list[ChatSession]:
    """Without drafts, and with drafts wherever there are any."""
    found = [session_over(folder, draft_tokens=tokens) for tokens in (0, 7)]
    for session in found:
        engine_of(session)._drafter.times = EagerTimes()
    return found


def engine_of(session: ChatSession) -> Engine:
    session.ensure_loaded()
    engine = session.client.backend._engine
    assert engine is not None
    return engine


def settled(session: ChatSession, parts) -> Reply:
    """The last part, whose text is that of the others."""
    parts = list(parts)
    said = (part.text for part in parts if isinstance(part, ReplyPiece) and not part.thinking)
    assert "".join(said) == parts[-1].text
    return parts[-1]


def talk(session: ChatSession, sampling: Sampling, wanted: Grammar | None, **settings) -> tuple[list[tuple], int]:
    """What is said in a chat of three replies, one of which is made anew; and the tokens that were accepted."""
    session.clear()
    session.sampling, session.grammar, session.max_tokens = sampling, wanted, 60
    session.stop_strings, session.think_budget = settings.get("stop", ()), settings.get("budget")
    replies = [settled(session, session.ask("Say it again: the cat sat on the mat, the cat sat on the mat"))]
    replies.append(settled(session, session.regenerate()))
    replies.append(settled(session, session.ask("And once more")))
    accepted = sum(sum(each.stats.accepted.values()) for each in replies)
    return [(each.text, each.thought, each.reason) for each in replies], accepted


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("wanted", GRAMMARS)
def test_chats_with_and_without_drafts_are_the_same(sessions, wanted, sampling):
    (plain, none), (drafted, accepted) = (talk(each, SAMPLINGS[sampling], GRAMMARS[wanted]) for each in sessions)
    assert drafted == plain
    assert none == 0
    assert accepted > 0 or wanted in ("none", "json")


@pytest.mark.parametrize(
    ("wanted", "sampling"), [*(("none", each) for each in SAMPLINGS), ("schema", "all"), ("regex", "greedy")]
)
def test_chats_with_a_draft_model_are_the_same(sessions, modelled, wanted, sampling):
    (plain, _), (drafted, _) = (talk(each, SAMPLINGS[sampling], GRAMMARS[wanted]) for each in (sessions[0], modelled))
    assert drafted == plain
    assert modelled.last.stats.drafted.get("model", 0) > 0 or wanted == "regex"  # which forces nearly all
    assert modelled.loaded.draft_model


@pytest.fixture(scope="module")
def with_block(tmp_path_factory) -> list[ChatSession]:
    """A hybrid whose prompt opens a thought, without drafts, and with those of its MTP block, which is right often."""
    folder = save_mtp(tmp_path_factory.mktemp("mtp") / "tiny", "qwen3_5_text")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": OPENED}))
    found = [session_over(folder), session_over(folder, draft_tokens=7, mtp="auto")]
    engine_of(found[1])._drafter.times = EagerTimes()
    return found


@pytest.mark.parametrize(
    ("wanted", "sampling", "budget"), [("none", "greedy", None), ("none", "all", 9), ("schema", "T 1", 0)]
)
def test_chats_with_an_mtp_block_are_the_same(with_block, wanted, sampling, budget):
    (plain, _), (drafted, _) = (talk(each, SAMPLINGS[sampling], GRAMMARS[wanted], budget=budget) for each in with_block)
    assert drafted == plain
    session = with_block[1]
    assert session.last.stats.drafted.get("mtp", 0) > 0 or wanted == "schema"  # whose text the grammar mostly forces
    assert session.loaded.draft_model == "mtp"
    assert session.loaded.no_mtp == ""
    text = plain[0][0] or plain[0][1]
    stop = (text[len(text) // 2 :][:2],)
    plain, drafted = (talk(each, SAMPLINGS[sampling], None, stop=stop, budget=budget)[0] for each in with_block)
    assert drafted == plain


def test_a_session_can_do_without_its_draft_model(modelled):
    modelled.draft = "lookup"
    try:
        talk(modelled, Sampling(), None)
        assert "model" not in modelled.last.stats.drafted
    finally:
        modelled.draft = "draft"


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_stop_strings_end_the_same_reply(sessions, sampling):
    text = talk(sessions[0], SAMPLINGS[sampling], None)[0][0][0]
    stop = (text[len(text) // 2 :][:2],) if len(text) > 4 else ("zz",)
    plain, drafted = (talk(each, SAMPLINGS[sampling], None, stop=stop)[0] for each in sessions)
    assert drafted == plain


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("wanted", ["none", "schema", "regex"])
@pytest.mark.parametrize("budget", [0, 9])
def test_thinking_budgets_end_the_same_thought(thinkers, wanted, budget, sampling):
    used = thinkers if wanted == "none" else thinkers[:2]
    (plain, _), (drafted, accepted), *modelled = (
        talk(each, SAMPLINGS[sampling], GRAMMARS[wanted], budget=budget) for each in used
    )
    assert drafted == plain
    assert [said for said, _ in modelled] == [plain] * len(modelled)
    assert all(len(thought) < 60 for _, thought, _ in plain)
    assert accepted > 0  # the ids that end a thought are certain


def test_a_session_that_asks_for_no_drafts_gets_none(sessions):
    session = sessions[1]
    session.draft = "off"
    try:
        assert talk(session, Sampling(), GRAMMARS["schema"])[1] == 0
    finally:
        session.draft = "auto"
    session.draft_max = 1
    try:
        session.clear()
        reply = settled(session, session.ask("again"))
        assert len(reply.stats.drafted_at) <= 1
    finally:
        session.draft_max = 7


def test_keys_of_a_schema_take_fewer_steps(sessions):
    session = sessions[1]
    session.clear()
    session.sampling, session.grammar, session.think_budget, session.stop_strings = (
        Sampling(),
        GRAMMARS["schema"],
        None,
        (),
    )
    stats = settled(session, session.ask("Who?")).stats
    assert stats.accepted["grammar"] == stats.drafted["grammar"] > 20
    assert stats.tokens_per_step > 1.3
    assert policy.prior(policy.kind_of("grammar", 0)) > 0.9


# ---- the constraint


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    backend = byte_level()
    return Vocabulary(backend, backend.get_vocab_size(), [0])


def test_what_a_grammar_forces_is_drafted_and_a_choice_is_not(vocabulary):
    constraint = GrammarConstraint(regex("abcd(x|y)ef"), vocabulary)
    tokens = vocabulary.tokens
    assert tokens.decode_bytes(constraint.draft()).startswith(b"abc")
    for id in tokens.tokenize_str("abcd"):
        constraint.accept(id)
    assert constraint.draft() == []


def test_a_fork_advances_alone(vocabulary):
    constraint = GrammarConstraint(json_schema(json.dumps(SCHEMA)), vocabulary)
    ids = vocabulary.tokens.tokenize_str('{"first_name": "a", "last')
    for count in range(len(ids)):
        before = constraint.mask().clone()
        fork = constraint.fork()
        for id in ids[count:]:
            assert fork.mask()[id // 32] >> id % 32 & 1
            fork.accept(id)
        again = fork.fork()
        again.mask()
        assert not fork.stopped
        assert (constraint.mask() == before).all()
        constraint.accept(ids[count])


def test_forks_know_the_keys_that_were_written(vocabulary):
    constraint = GrammarConstraint(json_schema('{"type": "object"}'), vocabulary)
    for id in vocabulary.tokens.tokenize_str('{"ab": 1, "'):
        constraint.accept(id)
    fork = constraint.fork()
    for id in vocabulary.tokens.tokenize_str("ab"):
        fork.accept(id)
    quote = next(id for id in itertools.count() if vocabulary.tokens.decode_bytes([id]) == b'"')
    assert not fork.mask()[quote // 32] >> quote % 32 & 1
