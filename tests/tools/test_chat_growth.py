"""What the measurement of a chat's growth calls growth: a slope, many steps, a descriptor, a thread; and whose."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cli.terminal_faces import Line
from tests.tools import chat_growth

KB, MB = 1024, 1024 * 1024


def chat(size, descriptors=lambda reply: 12, threads=lambda reply: 11, replies=400):
    """What a process held after each reply."""
    return [(40 * MB + size(reply), descriptors(reply), threads(reply)) for reply in range(replies)]


@pytest.mark.parametrize(
    ("size", "per_reply", "slope"),
    [
        (lambda reply: 0, 0, 0),
        (lambda reply: 600 * reply, 600, 600),
        (lambda reply: 10 * KB * min(reply, 100), 0, 0),
        (lambda reply: 70 * KB * (reply >= 320), 240, 0),
        (lambda reply: 4 * KB * (reply % 2), 14, 0),
    ],
    ids=["nothing", "little", "caches that fill", "one step", "up and down"],
)  # fmt: skip
def test_little_growth_is_let_pass(size, per_reply, slope):
    found = chat_growth.growth(chat(size))
    assert (found["bytes_per_reply"], found["slope"]) == (pytest.approx(per_reply, abs=1), slope)
    assert chat_growth.faults("front end", chat(size)) == []


@pytest.mark.parametrize(
    "size",
    [
        lambda reply: 1100 * reply,
        lambda reply: 70 * KB * (reply // 40),
        lambda reply: MB * (reply >= 250),
        lambda reply: 1100 * reply - MB * (reply == 399),
    ],
    ids=["a slope", "many steps", "one large step", "a slope that the last reply hides"],
)
def test_growth_is_named(size):
    (line,) = chat_growth.faults("engine", chat(size))
    assert line.startswith("engine: ")
    assert line.endswith("bytes a reply")


def test_descriptors_and_threads_that_are_left_are_named():
    more = lambda reply: 12 + reply // 90  # noqa: E731
    assert chat_growth.faults("front end", chat(lambda reply: 0, more, more)) == [
        "front end: 16 descriptors, 14 before",
        "front end: 16 threads, 14 before",
    ]


def test_every_process_of_a_chat_is_measured(tmp_path: Path):
    report = chat_growth.campaign(tmp_path, Line(), 4, 1)
    assert set(report.held) == {"front end", "engine", "templates"}
    assert all(len(held) == 4 and min(size for size, _, _ in held) > MB for held in report.held.values())
