"""Reasons of a plan, one line each for embedding, head, KV cache and context. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from localq import kv_bits
from localq.errors import LocalqError
from localq.files.architecture import Architecture
from localq.planner import plan as memory_plan
from localq.planner.placement import HEAD_NAMES, STORED, Placement, Wishes
from localq.planner.plan import Budget, Plan

ASKED = "as requested"


@dataclass(frozen=True)
class Line:
    """One decision: its subject, value, reason, and the option that changes it."""

    what: str
    value: str
    why: str
    option: str


def lines(plan: Plan, wishes: Wishes, arch: Architecture, budget_bytes: Budget, scheme: str = "") -> list[Line]:
    """The reasons of a plan for `arch` and `wishes` within `budget_bytes` (None: the CPU, without limit)."""
    reasons = _Reasons(plan, wishes, arch, budget_bytes, scheme)
    device = "on the GPU" if isinstance(budget_bytes, int) else "in RAM"
    places = {"device": device, "host": "in RAM, one row read per token"}
    own = ", separate from the embedding" if arch.tied and plan.head != "16" else ""
    shared = ", shared with the embedding" if arch.tied and plan.head == "16" else ""
    found = [
        Line("embedding", places[plan.embed], reasons.why("embed", wishes.embed != "auto"), "--embed"),
        Line("head", HEAD_NAMES[plan.head] + own + shared, reasons.why("head", wishes.head != "auto"), "--head"),
        Line("KV cache", kv_bits.text(plan.kv_bits), reasons.why("kv_bits", wishes.kv_bits is not None), "--kv"),
        Line("context", f"{plan.ctx:,} tokens", _context(plan, wishes, arch, budget_bytes), "--ctx"),
    ]
    if arch.input_width:
        is_moved = plan.input_table == "host"
        why = "saves memory; changes neither replies nor speed" if is_moved else "the default"
        found.insert(1, Line("layer inputs", places[plan.input_table], why, "--embed"))
    return found


@dataclass(frozen=True)
class _Reasons:
    plan: Plan
    wishes: Wishes
    arch: Architecture
    budget_bytes: Budget
    scheme: str

    def why(self, field: str, asked: bool) -> str:
        """The reason for the value of one field of the placement."""
        if asked:
            return ASKED
        if field == "head" and self.plan.head == STORED:
            return "the default"
        best = getattr(Placement(), field)
        if getattr(self.plan, field) == best:
            return "the default"
        return f"saves memory; {self._without(field, best)}"

    def _without(self, field: str, best: int | str) -> str:
        """The context with the best value of `field`, or with nothing reduced if that is impossible."""
        for placement in (replace(self.plan.placement, **{field: best}), Placement()):  # type: ignore[arg-type]
            head = "auto" if placement.head == STORED else placement.head
            wishes = Wishes(None, placement.kv_bits, placement.embed, head, self.plan.rows - 1, self.plan.draft)
            try:
                other = memory_plan.assess(
                    self.arch, self.plan.format, self.budget_bytes, wishes=wishes, scheme=self.scheme,
                    weights=self.plan.ledger.components["weights"],
                )  # fmt: skip
            except LocalqError:  # a tied table can move only together with its head
                continue
            return (
                f"otherwise only {other.ctx:,} tokens would fit" if other.fits else "otherwise the model would not fit"
            )
        return "otherwise the model would not fit"


def _context(plan: Plan, wishes: Wishes, arch: Architecture, budget_bytes: Budget) -> str:
    if wishes.ctx is not None:
        return ASKED
    if plan.ctx == arch.max_context:
        return "the model's maximum"
    if not isinstance(budget_bytes, int) and plan.ctx == memory_plan.CPU_CONTEXT:
        return "the default on the CPU"
    is_reduced = (wishes.head == "auto" and plan.head not in ("16", STORED)) or (
        wishes.kv_bits is None and plan.kv_bits != 16
    )
    if is_reduced and plan.ctx == memory_plan.comfortable_context(arch):
        return "a larger context needs lower precision"
    if not plan.fits:
        return "the minimum"
    return "the largest that fits"
