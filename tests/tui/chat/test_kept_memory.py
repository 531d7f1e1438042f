"""What the full screen keeps of turns that are gone: nothing of how they were drawn, and no cache that grows."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter

from textual._styles_cache import StylesCache
from textual.cache import FIFOCache, LRUCache

from localq.tui import preload
from localq.tui.chat import part_cache
from tests.support.tui.tui_pilot import chat_app, drive_chat, say

TURNS = 6
WARM, LATE = 10, 6  # replies that fill caches; those that may not
GROWS = 4  # entries a reply: what grows takes more, while layouts that are new for a few replies take fewer


def test_lines_of_replies_that_are_gone_are_freed():
    app, kept = chat_app(*[["Hello, and *so* on.\n\n- one\n- two\n"]] * TURNS), []

    async def script(pilot):
        for number in range(TURNS):
            await say(pilot, f"say {number}")
            await say(pilot, "/new")
            gc.collect()
            kept.append(sum(isinstance(each, StylesCache) for each in gc.get_objects()))

    drive_chat(app, script)
    assert kept[-1] == kept[1], kept


def cached_functions():
    """Those of Textual, rich and localq with a cache; not by `gc`, from which modules may be frozen."""
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in ("textual", "rich", "localq")]
    found = [each for module in modules for each in list(vars(module).values())]
    members = [each for owner in found if isinstance(owner, type) for each in vars(owner).values()]
    bare = [getattr(each, "__func__", each) for each in found + members]
    return {each for each in bare if isinstance(each, functools._lru_cache_wrapper)}


def entries():
    """Name of a cache, of functools or of Textual -> its entries; Textual's of one class are one."""
    found = Counter()
    for each in cached_functions():
        found[f"{each.__module__}.{each.__qualname__}"] += each.cache_info().currsize
    for each in gc.get_objects():
        if isinstance(each, LRUCache | FIFOCache):
            found[type(each).__name__] += len(each)
    return found


def growing():
    """The caches that grow with every reply, in a chat where no text is said twice."""
    words = "Reply{0} *and{0}* so{0}.\n\n- one{0}\n- two{0}\n"
    app, seen = chat_app(*([words.format(number)] for number in range(WARM + LATE))), []

    async def script(pilot):
        for number in range(WARM + LATE):
            await say(pilot, f"say {number}")
            await say(pilot, "/new")
            gc.collect()
            seen.append(entries())

    drive_chat(app, script)
    before, after = seen[WARM - LATE : WARM], seen[WARM:]
    more = {name: max(each[name] for each in after) - max(each[name] for each in before) for name in after[-1]}
    return {name for name, count in more.items() if count >= GROWS * LATE}


def test_no_cache_grows_with_replies():
    assert growing() == set()


def test_caches_that_are_not_cleared_are_seen_to_grow(monkeypatch):
    monkeypatch.setattr(preload, "collect_garbage", lambda: None)
    monkeypatch.setattr(part_cache.PartCache, "part", lambda node, kind: node.query_one(kind))
    expected = {"rich.cells.cached_cell_len", "textual._styles_cache.StylesCache.get_inner_outer", "LRUCache"}
    assert growing() >= expected
