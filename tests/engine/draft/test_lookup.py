"""Prompt look-up: the longest match of the last tokens, what follows it, and an index that grows and is cut."""

from __future__ import annotations

import random
import time

from localq.engine.draft.lookup import LEAST, LONGEST, LookupIndex, Match


def index_of(ids: list[int]) -> LookupIndex:
    index = LookupIndex()
    index.begin(ids)
    return index


def slowly(ids: list[int]) -> int:
    """Length of the longest match, up to LONGEST, that a search through the whole text finds."""
    best = 0
    for end in range(LEAST, len(ids)):
        length = 0
        while length < min(LONGEST, end) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= LEAST else 0


def test_what_followed_the_last_tokens_earlier_is_found():
    index = index_of([1, 2, 3, 4, 5, 6, 7, 9, 2, 3, 4])
    assert index.match() == Match(3, 4)
    assert index.following(index.match(), 4) == [5, 6, 7, 9]


def test_no_match_is_shorter_than_the_least():
    assert index_of([1, 2, 3, 4, 2, 3]).match() is None
    assert index_of([]).match() is None
    assert index_of([5] * LEAST).match() is None


def test_the_longest_of_the_latest_places_wins():
    index = index_of([8, 1, 2, 3, 7, 0, 1, 2, 3, 6, 8, 1, 2, 3])
    assert index.match() == Match(4, 4)


def test_of_equal_places_the_latest_wins():
    index = index_of([8, 1, 2, 3, 7, 8, 1, 2, 3, 6, 8, 1, 2, 3])
    assert index.following(index.match(), 1) == [6]


def test_a_match_that_goes_on_is_kept_and_grows():
    index = index_of([1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3])
    for count, token in enumerate((4, 5, 6), 4):
        index.push(token)
        assert index.match() == Match(count, count)
    index.push(0)
    assert index.match() is None


def test_a_repetition_drafts_beyond_the_end_of_the_text():
    index = index_of([4, 5, 6, 4, 5, 6, 4])
    assert index.following(index.match(), 8) == [5, 6, 4, 5, 6, 4, 5, 6]


def test_every_match_is_a_match_and_none_is_missed_in_texts_of_few_words():
    rng = random.Random(1)
    for _ in range(60):
        ids = [rng.randrange(3) for _ in range(rng.randint(1, 60))]
        index = LookupIndex()
        for count, token in enumerate(ids, 1):
            index.push(token)
            match, text = index.match(), ids[:count]
            assert (match is None) == (slowly(text) == 0)
            if match is not None:
                assert LEAST <= match.length < count
                assert text[match.behind - match.length : match.behind] == text[-match.length :]


def test_a_cut_text_is_as_one_that_was_never_longer():
    rng = random.Random(2)
    index = LookupIndex()
    for _ in range(40):
        ids = [rng.randrange(4) for _ in range(rng.randint(0, 50))]
        kept = rng.randint(0, len(ids))
        index.begin(ids)
        index.begin(ids[:kept])
        fresh = index_of(ids[:kept])
        assert len(index) == kept
        for token in [rng.randrange(4) for _ in range(10)]:
            index.push(token)
            fresh.push(token)
        match, expected = index.match(), fresh.match()
        assert (match is None) == (expected is None)
        if match is not None and expected is not None:
            assert index.following(match, 5) == fresh.following(expected, 5) or match.length >= expected.length


def test_a_token_costs_microseconds():
    rng = random.Random(3)
    ids = [min(rng.randrange(1, 5000) for _ in range(3)) for _ in range(30_000)]
    started = time.perf_counter()
    index_of(ids)
    assert (time.perf_counter() - started) / len(ids) < 100e-6
