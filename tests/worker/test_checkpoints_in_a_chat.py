"""A chat with models that cannot forget their last tokens: the same words as with everything computed anew."""

from __future__ import annotations

import pytest

from localq.chat.session import ChatSession
from localq.sampling import Sampling
from tests.support.chat.scripted_client import streamed
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.worker.in_process_client import session_over

KINDS = {
    "qwen3_5_text": {"initializer_range": 0.1},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


def _walk(session: ChatSession) -> list[tuple[str, int]]:
    """Turns, another reply, another message, an earlier one, and going on: the text of each, and what was kept."""
    session.system, session.sampling, session.max_tokens = "Answer in short words, and no others.", Sampling(), 24
    ways = (
        lambda: session.ask("What is a cache of kinds, said in one long sentence?"),
        lambda: session.ask("And what else may there be in it?"),
        session.regenerate,
        lambda: session.edit("And who may want to know?"),
        lambda: session.edit("Something different to begin with?", turn=0),
        lambda: session.ask("The last question of this chat."),
        session.continue_reply,
    )
    found = []
    for way in ways:
        _, reply, _ = streamed(way())
        found.append((reply.text, reply.stats.cached_tokens))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_through_a_chat_says_the_same_and_computes_less(kind, tmp_path):
    folder = make_checkpoint(tmp_path / "tiny", kind, **{"initializer_range": 0.15, **KINDS[kind]})
    kept, anew = (_walk(session_over(folder, checkpoint_bytes=size)) for size in (None, 0))
    assert [text for text, _ in kept] == [text for text, _ in anew]
    assert all(text for text, _ in kept)
    of_first, of_second, again, edited, earlier, *_ = (tokens for _, tokens in kept)
    assert of_first == 0
    assert 0 < earlier < 60  # behind the system prompt
    assert of_second > earlier  # before or behind the first reply, whose text may give other tokens than were said
    assert again > of_second  # before the second reply
    assert edited >= of_second
    assert sum(tokens for _, tokens in kept) > sum(tokens for _, tokens in anew)
