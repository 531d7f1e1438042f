"""More memory never gives less context, over the whole catalogue; and nothing is reduced in vain.

Contexts are 0 where a model does not fit. Every offer of the catalogue (a model in one format) is planned for cards of
4 to 96 GiB: every 64 MiB with default settings, every GiB with each pair of settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest

from localq.errors import LocalqError
from localq.files import catalog
from localq.planner import fit_rows, offers, room
from localq.planner import plan as memory_plan
from localq.planner.fit_rows import Memory
from localq.planner.offers import Offer
from localq.planner.placement import Placement, Wishes

pytestmark = pytest.mark.usefixtures("no_own_models")

MIB, GIB = 2**20, 2**30
CARDS = range(4 * GIB, 96 * GIB + 1, 64 * MIB)
COARSE = range(4 * GIB, 96 * GIB + 1, GIB)
# Values of each setting besides its default, the first.
SETTINGS = {
    "kv_bits": (None, 16, 8, "k8v4", 4),
    "embed": ("auto", "device", "host"),
    "head": ("auto", "16", "8", "nf4"),
    "desktop": (0, room.DESKTOP_BYTES, 3 * GIB),
    "reserve": (0, 300 * MIB, 2 * GIB),
}
Setting = dict[str, object]


def pairs() -> Iterator[Setting]:
    """Every pair of values of two settings, the others at their defaults; each once."""
    default: Setting = {name: values[0] for name, values in SETTINGS.items()}
    seen = []
    for first, second in combinations(SETTINGS, 2):
        for one, other in product(SETTINGS[first], SETTINGS[second]):
            found = {**default, first: one, second: other}
            if found not in seen:
                seen.append(found)
                yield found


def contexts(offer: Offer, wishes: Wishes, budgets: Iterator[int] | range) -> list[int]:
    """The context of each budget."""
    found = []
    for budget in budgets:
        plan = memory_plan.assess(offer.arch, offer.format, max(budget, 0), wishes=wishes, scheme=offer.scheme)
        found.append(plan.ctx if plan.fits else 0)
    return found


def of_budgets(offer: Offer, wishes: Wishes, known: dict[Wishes, dict[int, int]], kept: int) -> list[int]:
    """The context of each card of `COARSE` with so many bytes kept free; what is known is not planned again."""
    budgets, found = [size - kept for size in COARSE], known.setdefault(wishes, {})
    new = [each for each in budgets if each not in found]
    found.update(zip(new, contexts(offer, wishes, iter(new)), strict=True))
    return [found[each] for each in budgets]


@pytest.fixture(scope="module")
def every_offer() -> list[Offer]:
    """One of those that are planned alike: of one shape, in one format."""
    return [*{(each.arch, each.format, each.scheme): each for each in offers.of_catalogue()}.values()]


def test_with_default_settings_every_64_mib_gives_at_least_as_much(every_offer):
    for offer in every_offer:
        found = contexts(offer, Wishes(), CARDS)
        assert found == sorted(found), offer.name
        with_desktop = contexts(offer, Wishes(), (size - room.DESKTOP_BYTES for size in CARDS))
        assert all(less <= more for less, more in zip(with_desktop, found, strict=True)), offer.name


@pytest.mark.timeout(900)  # a minute on two idle cores
def test_with_any_pair_of_settings_every_gib_gives_at_least_as_much(every_offer):
    planned, all_pairs = 0, [*pairs()]
    for offer in every_offer:
        known: dict[Wishes, dict[int, int]] = {}  # contexts by budget: a whole number of GiB that is kept shifts them
        for setting in all_pairs:
            wishes = Wishes(None, setting["kv_bits"], setting["embed"], setting["head"])
            kept = int(setting["desktop"]) + int(setting["reserve"])
            try:
                alone, found = (of_budgets(offer, wishes, known, each) for each in (0, kept))
            except LocalqError:  # this shape does not support the wishes, whatever the memory
                continue
            assert found == sorted(found), (offer.name, setting)
            assert all(less <= more for less, more in zip(found, alone, strict=True)), (offer.name, setting)
            planned += len(found)
    assert planned > 0.8 * len(every_offer) * len(COARSE) * len(all_pairs)


def test_rows_of_fit_have_the_contexts_of_these_plans(every_offer):
    """What `fit` prints for a card, with a desktop and without it."""
    for offer in every_offer:
        for size in COARSE[::7]:
            row = fit_rows.row_of(offer, Memory(size, room.DESKTOP_BYTES, 300 * MIB), Wishes(), None)
            budgets = (size - room.DESKTOP_BYTES - 300 * MIB, size - 300 * MIB)
            assert [row.ctx_max, row.ctx_max_no_desktop] == contexts(offer, Wishes(), iter(budgets))
            assert row.ctx_max <= row.ctx_max_no_desktop
            ctx = min(40_000, offer.arch.max_context)
            asked = fit_rows.row_of(offer, Memory(size, room.DESKTOP_BYTES), Wishes(ctx), None)
            assert asked.ctx_max <= asked.ctx_max_no_desktop
            assert asked.fits == (asked.ctx_max >= ctx), offer.name


def test_a_requested_context_that_fits_a_card_fits_every_larger_one(every_offer):
    for offer in every_offer:
        ctx = min(20_000, offer.arch.max_context)
        fits = [context == ctx for context in contexts(offer, Wishes(ctx), COARSE)]
        assert fits == sorted(fits), offer.name


def test_replies_are_reduced_only_where_16k_tokens_need_it_and_by_no_more(every_offer):
    """The best head and KV cache that leave the context are taken, and no context beyond it is bought with them."""
    for offer in every_offer:
        arch, target = offer.arch, memory_plan.comfortable_context(offer.arch)
        least = Wishes().placements(arch)[-1]
        for size in COARSE[:29]:
            plan = memory_plan.assess(arch, offer.format, size, scheme=offer.scheme)
            if not plan.fits:
                continue
            if plan.ctx < target:  # then nothing reaches it
                assert context(offer, size, least) < target
                continue
            for field in ("head", "kv_bits"):
                best = getattr(Placement(), field)
                if getattr(plan, field) != best:
                    assert plan.ctx == target
                    unreduced = replace(plan.placement, **{field: best})
                    if arch.tied and field == "head":
                        unreduced = replace(unreduced, embed="device")
                    assert context(offer, size, unreduced) < target, (offer.name, size, field)


def context(offer: Offer, size: int, placement: Placement) -> int:
    """The context with exactly this placement."""
    wishes = Wishes(None, placement.kv_bits, placement.embed, placement.head)
    return contexts(offer, wishes, iter([size]))[0]


def test_the_table_on_the_gpu_never_costs_context(every_offer):
    for offer in every_offer:
        if offer.arch.tied:
            continue
        for size in COARSE[::3]:
            plan = memory_plan.assess(offer.arch, offer.format, size, scheme=offer.scheme)
            on_host = memory_plan.assess(
                offer.arch, offer.format, size, scheme=offer.scheme, wishes=Wishes(embed="host")
            )
            assert (plan.fits, plan.ctx) == (on_host.fits, on_host.ctx)


def test_a_larger_format_is_taken_only_where_16k_tokens_remain():
    for entry in catalog.load_catalogue():
        for size in COARSE[:29:4]:
            choice = offers.choose(entry, size, Wishes())
            target = memory_plan.comfortable_context(entry.arch)
            if choice.taken.plan.fits and choice.taken.plan.ctx < target:
                published = [
                    each for each in choice.candidates if each.usable and each.offer.source and not each.offer.last
                ]
                assert all(each.plan.ctx < target for each in published), (entry.name, size)
