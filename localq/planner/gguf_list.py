"""The list of the GGUF models of a repository with the verdict on each for one card, and the best that fits.

It is the error (exit 2) for a name that does not say which of them is meant. Torch-free.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from localq import gpus
from localq.errors import ExitCode, LocalqError
from localq.files import gguf_choice
from localq.files.catalog import Target
from localq.files.gguf_choice import SeveralGgufError
from localq.files.hub import fetch as hub
from localq.planner import choose, fit_rows, gguf_offers, room
from localq.planner import plan as memory_plan
from localq.planner.fit_rows import Memory
from localq.planner.gguf_offers import GgufOffer
from localq.planner.plan import Budget
from localq.settings import Settings
from localq.wording import human_bytes, table_lines


@dataclass(frozen=True)
class CardVerdict:
    """Fit of a model on a card: the tokens of context, 0 if it does not fit, and the same in words."""

    ctx: int
    text: str
    is_usable: bool = False


class GgufListError(LocalqError):
    """The GGUF models of a repository, one a line, instead of a model (exit 2)."""

    def __init__(self, repo: str, count: int, lines: Sequence[str], step: str) -> None:
        self.lines = tuple(lines)
        why = f"found {count} GGUF models; select one by its tag"
        super().__init__(repo, why, step, ExitCode.USAGE)

    def __str__(self) -> str:
        return "\n".join((f"{self.what}: {self.why}:", *self.lines, self.next_step))


@contextlib.contextmanager
def explain(
    targets: Sequence[Target], settings: Settings, verb: str, revision: str | None = None, *, local: bool = False
) -> Iterator[None]:
    """Replace the error of a repository with several GGUF models by the list of them, with the verdict on each.

    verb   of localq, for the command at its end; local: list what is on this machine
    """
    try:
        yield
    except SeveralGgufError as error:
        target = next((each for each in targets if each.repo == error.what), None)
        if target is None:
            raise
        try:
            found = gguf_offers.models(target, local or settings.offline, revision)
        except LocalqError:
            raise error from None
        raise list_error(target, found, settings, verb, revision) from error


def check(target: Target, settings: Settings, verb: str) -> None:
    """Raise the list for a repository of several GGUF models: before the screen is taken, which would show one line.

    Other errors are left to the opening of the model.
    """
    if target.repo is None or target.entry is not None or target.choice or hub.local_path(target) is not None:
        return
    try:
        found = gguf_offers.models(target, settings.offline)
    except LocalqError:
        return
    if len(found) > 1:
        raise list_error(target, found, settings, verb)


def list_error(
    target: Target, found: Sequence[GgufOffer], settings: Settings, verb: str, revision: str | None = None
) -> GgufListError:
    """The list of GGUF models, which ends with the command for the best that fits."""
    assert target.repo is not None, "only a repository has several"
    budget = room.planned(settings).budget
    verdicts = [_verdict(each, budget, settings) for each in found]
    rows = [
        [each.choice.label, human_bytes(each.bytes), str(len(each.choice.files)), verdict.text]
        for each, verdict in zip(found, verdicts, strict=True)
    ]
    lines = table_lines(["TAG", "SIZE", "PARTS", "VERDICT"], rows, frozenset({1, 2}))
    best = _best(found, verdicts)
    if best is None:
        step = f"None of them fits on this machine. To list the models that fit, run {gpus.fit_command()}."
    else:
        step = f"Run `localq {verb} {best.choice.name(target.repo, revision or target.revision)}`."
    return GgufListError(target.repo, len(found), lines, step)


def _best(found: Sequence[GgufOffer], verdicts: Sequence[CardVerdict]) -> GgufOffer | None:
    """The usual choice if it fits, else the largest that does; those that leave a usable context come first."""
    pairs = list(zip(found, verdicts, strict=True))
    fitting = [each for each, verdict in pairs if verdict.is_usable] or [each for each, verdict in pairs if verdict.ctx]
    usual = next((each for each in fitting if each.choice.tag == gguf_choice.DEFAULT_TAG), None)
    return usual or max(fitting, key=lambda each: each.bytes, default=None)


def _verdict(model: GgufOffer, budget: Budget, settings: Settings) -> CardVerdict:
    offer = model.offer
    if offer is None or offer.unsupported:
        return CardVerdict(0, f"not supported: {model.problem if offer is None else offer.unsupported}")
    wishes = choose.wishes_of(settings)
    if isinstance(budget, int):
        row = fit_rows.row_of(offer, Memory(budget, 0), wishes, None)
        ctx, why_not = row.ctx_max if row.fits else 0, row.reason
    else:
        plan = memory_plan.assess(
            offer.arch, offer.format, budget, wishes=wishes, weights=offer.block_bytes, scheme=offer.scheme,
            name=offer.name,
        )  # fmt: skip
        ctx, why_not = plan.ctx if plan.fits else 0, plan.reason
    if not ctx:
        return CardVerdict(0, f"too large: {why_not}")
    is_usable = ctx >= (wishes.ctx or min(memory_plan.USABLE_CONTEXT, offer.arch.max_context))
    return CardVerdict(ctx, f"fits with {ctx:,} tokens of context", is_usable)
