"""How launches are timed cold: copies that outgrow the cache, and turns that outweigh the start of a graph."""

from __future__ import annotations

import pytest

from localq.bench.kernels.roofline import GRAPH_US, copies_for_cold_cache, turns_for

MIB = 2**20


@pytest.mark.parametrize("bytes_each", [3 * MIB, 50 * MIB, 700 * MIB])
def test_copies_outgrow_the_cache(bytes_each):
    cache = 60 * MIB
    copies = copies_for_cold_cache(bytes_each, cache)
    # what was touched between two visits of the same copy
    assert (copies - 1) * bytes_each > 2 * cache
    assert copies >= 2


@pytest.mark.parametrize(("start", "each", "launches"), [(10, 20.0, 3), (10, 1.1, 70), (10, 9000.0, 2), (12, 640.0, 2)])
def test_the_start_of_a_graph_is_less_than_a_hundredth(start, each, launches):
    turns = turns_for(start + each * launches)
    whole = turns * each * launches
    assert start < 0.01 * whole
    assert turns == 1 or whole < 2 * GRAPH_US, "no longer than it must be"
