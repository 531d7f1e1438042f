"""Windows that slide: what stays in their slots, how far a text can go back, and what is never moved."""

from __future__ import annotations

import random

import pytest
import torch

from localq.engine.cache import KVCache
from localq.engine.sliding import SlidingWindow
from localq.files.layer_caches import KeysAndValues

CONTEXT = 400


class Text:
    """A window whose slots hold the number of their position, and what a text does with it."""

    def __init__(self, window: int, chunk: int) -> None:
        self.window = SlidingWindow(window, chunk, window + chunk, "cpu")
        self.part = torch.zeros(2, self.window.capacity, 3)
        self.window.add([self.part])
        self.tokens = 0

    def run(self, count: int) -> None:
        self.window.make_room(self.tokens, count)
        slots = slice(self.tokens - self.window.base, self.tokens + count - self.window.base)
        assert slots.stop <= self.window.capacity
        self.part[:, slots] = torch.arange(self.tokens, self.tokens + count, dtype=torch.float32)[:, None]
        self.tokens += count
        self.check()

    def check(self) -> None:
        seen = range(max(0, self.tokens - self.window.window + 1), self.tokens)
        slots = self.window.slots_of(self.tokens)
        assert self.part[1, slots, 2].tolist() == list(seen)
        assert self.window.base_on_device.item() == self.window.base


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_what_a_token_sees_stays_whatever_the_passes_are(window, chunk):
    choose = random.Random(100 * window + chunk)
    text = Text(window, chunk)
    pieces = 0
    while text.tokens < 40 * (window + chunk):
        if choose.random() < 0.15 and text.window.keeps(back := max(0, text.tokens - choose.randrange(1 + chunk))):
            text.tokens = back
            text.check()
        text.run(choose.choice([1, 1, 1, chunk, choose.randint(1, chunk)]))
        pieces += 1
    assert pieces > 40


def test_after_steps_a_text_can_go_back_by_about_half_a_chunk():
    text = Text(10, 8)
    text.run(8)
    for _ in range(100):
        text.run(1)
        assert text.window.keeps(text.tokens - 4)
        assert text.window.keeps(text.tokens - 20) == (text.window.base == 0)


def test_the_start_of_a_text_is_always_there_to_begin_with():
    window = Text(10, 8).window
    assert all(window.keeps(tokens) for tokens in range(CONTEXT))
    window.make_room(40, 8)
    assert not window.keeps(0)
    window.make_room(0, 8)
    assert window.base == 0


def test_positions_that_were_never_written_are_finite():
    """A warm-up passes from the first to the last position of a context, and back."""
    text = Text(10, 8)
    for first in (0, CONTEXT - 8, CONTEXT - 1, 50, 0):
        text.window.make_room(first, 1)
        assert 0 <= first - text.window.base < text.window.capacity
    assert text.part.isfinite().all()


def test_clear_starts_again():
    layout = [KeysAndValues(2, 4, 6), KeysAndValues(2, 4)]
    cache = KVCache(layout, CONTEXT, torch.float32, "cpu", chunk=5)
    k = torch.ones(1, 2, 4)
    for position in range(30):
        cache.make_room(position, 1)
        for layer in (0, 1):
            cache.update(layer, k, k, torch.tensor([position]), position + 1)
    base, live = cache.view(6, 30)
    assert (cache.view(0, 30), base + live) == ((0, 30), 30)
    assert base > 10
    cache.clear(28)
    assert cache.keys[0][0, :, 0].tolist()[:live] == [1.0] * (live - 2) + [0.0] * 2
    assert cache.keys[1][0, :30, 0].tolist() == [1.0] * 28 + [0.0] * 2
    cache.clear()
    assert cache.view(6, 1) == (0, 1)
    assert not any(buffer.any() for buffer in (*cache.keys, *cache.values))


def test_a_context_no_longer_than_window_and_pass_does_not_move():
    cache = KVCache([KeysAndValues(2, 4, 6)], 11, torch.float32, "cpu", chunk=5)
    assert cache.longest_pass == 11
    for first, count in ((0, 11), (0, 3), (3, 8)):
        cache.make_room(first, count)
        assert cache.view(6, 11) == (0, 11)
    cache.place(9)  # as of a snapshot
    assert cache.view(6, 11) == (4, 7)
    assert not cache.keeps(8)
    cache.make_room(9, 2)
    assert cache.view(6, 11) == (4, 7)
    assert KVCache([KeysAndValues(2, 4, 6)], 12, torch.float32, "cpu", chunk=5).longest_pass == 5
    assert KVCache([KeysAndValues(2, 4)], 12, torch.float32, "cpu", chunk=5).longest_pass == 12
