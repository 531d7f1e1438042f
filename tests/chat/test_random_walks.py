"""Random walks through everything that can be done with a conversation: nothing is lost, whatever comes in between."""

from __future__ import annotations

import random

import pytest

from localq.chat.history.store import ConversationStore
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.worker.messages import Load
from tests.support.chat.scripted_client import DEAD, CharTokenizer, ScriptedClient

CONTEXT = 260
STEPS = 120


class Walk:
    """A session, and all that was said in it: `said` by the user, `heard` from the model."""

    def __init__(self, rng: random.Random, store: ConversationStore) -> None:
        self.rng, self.store, self.count = rng, store, 0
        self.said: list[str] = []
        self.heard: list[str] = []
        self.session = ChatSession(ScriptedClient(context_size=CONTEXT), Load("path"), CharTokenizer(), store=store)

    def text(self) -> str:
        self.count += 1
        return f"{self.count}:" + "x" * self.rng.choice([0, 3, 20, 60, 300 if self.rng.random() < 0.1 else 5])

    def replies(self) -> None:
        """What the engine does next: it answers, dies at once or in the middle."""
        pieces: list[str | LocalqError] = [f"r{self.count}.{part}" + "y" * 8 for part in range(self.rng.randint(0, 3))]
        if self.rng.random() < 0.25:
            pieces.insert(self.rng.randint(0, len(pieces)), DEAD)
        self.session.client.scripts = [pieces]

    def stream(self, parts) -> None:
        """Read a reply to its end, or stop it, or leave it."""
        failed: LocalqError | None = None
        got, way = "", self.rng.choice(["all", "all", "stop", "leave"])
        try:
            for part in parts:
                if isinstance(part, Reply):
                    assert part.text == got
                    break
                assert isinstance(part, ReplyPiece)
                got += part.text
                if part.text and way == "stop":
                    self.session.stop()
                if part.text and way == "leave":
                    break
        except LocalqError as error:
            failed = error
        finally:
            parts.close()
        assert failed in (None, DEAD) or f"too long for the {CONTEXT}-token context" in str(failed)
        assert all(len(prompt) < CONTEXT for prompt in self.session.client.prompts)
        self.heard += [got] if got else []

    def say(self) -> None:
        self.said.append(self.text())
        self.replies()
        self.stream(self.session.ask(self.said[-1]))

    def edit(self) -> None:
        if self.session.conversation.last_user() is not None:
            self.said.append(self.text())
            self.replies()
            self.stream(self.session.edit(self.said[-1]))

    def regenerate(self) -> None:
        if self.session.conversation.last_user() is not None:
            self.replies()
            self.stream(self.session.regenerate())

    def undo(self) -> None:
        if self.session.conversation.last_user() is not None:
            self.session.conversation.undo()

    def take(self) -> None:
        if turns := self.session.conversation.turns:
            self.session.conversation.switch_to(self.rng.randrange(len(turns)))

    def clear(self) -> None:
        self.session.clear()

    def restart(self) -> None:
        """Another process goes on with what was saved."""
        self.session.try_save()
        if self.session.record.id is not None:
            other = ChatSession(ScriptedClient(context_size=CONTEXT), Load("path"), CharTokenizer(), store=self.store)
            other.switch_to(self.store.load(self.session.record.id))
            assert other.conversation == self.session.conversation
            self.session = other

    def check(self) -> None:
        conversation = self.session.conversation
        contents = [turn.message.content for turn in conversation.turns]
        assert [each for each in contents if ":" in each] == self.said
        assert set(self.heard) <= set(contents)
        roles = [message.role for message in self.session.messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2)


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost(tmp_path, seed):
    rng = random.Random(seed)
    walk = Walk(rng, ConversationStore(tmp_path / "sessions.db"))
    steps = [walk.say] * 5 + [walk.edit, walk.regenerate, walk.undo, walk.take, walk.clear]
    for _ in range(STEPS):
        rng.choice(steps)()
        walk.check()
        if rng.random() < 0.1:
            walk.restart()
    assert len(walk.said) > STEPS // 3
    assert len(walk.heard) > STEPS // 4
