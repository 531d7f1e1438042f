"""The report on the planner: its bounds are bounds, and its cases are loads that the planner takes."""

from __future__ import annotations

import json

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.planner import placement
from localq.planner import plan as memory_plan
from tests.tools import planner_report
from tests.tools.planner_report import CASES, FIRST, LAST, MIB, STEP, Case, Outcome, Turn, main


class FakeLab:
    """A device of numbers: every measurement is `predicted` and `error`; loads need `needs` bytes free."""

    def __init__(
        self, error: int = 0, allocations: int = 0, needs: int = 2048 * MIB, leak: int = 0, late: float = 0.0
    ) -> None:
        self.error, self.allocations, self.needs, self.leak, self.late = error, allocations, needs, leak, late
        self.free, self.cycles, self.runs_out, self.breaks = 0, 0, False, False

    def measure(self, case: Case) -> Outcome:
        if self.free and self.free < self.needs:
            if self.breaks:
                raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED")
            why = "ran out of memory while loading" if self.runs_out else "needs 2,048 MiB"
            raise LocalqError(case.name, why, "Less.", ExitCode.DOES_NOT_FIT)
        size = 10_000 * MIB
        return Outcome(case, 4096, size, size, size + self.error, None, self.allocations, 1.0, 99.0, 101.0)

    def hold(self, free: int) -> int:
        self.free = free
        return free

    def turn(self, case: Case, depth: int, added: int) -> Turn:
        return Turn(depth / 1000, 0.1 + self.late, added + 1, 0.1)

    def cycle(self) -> int:
        self.cycles += 1
        return 100_000 * MIB - self.leak * self.cycles


def run(capsys, lab: FakeLab, *arguments: str) -> tuple[int, dict]:
    code = main(arguments, lambda: lab)
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_all_parts_pass_on_a_device_that_does_what_was_predicted(capsys):
    code, body = run(capsys, lab := FakeLab())
    assert (code, body["ok"], len(body["table"]["rows"])) == (0, True, len(CASES))
    assert lab.cycles == planner_report.CYCLES + 1
    assert body["ballast"]["counts"] == {"fits": 13, "refused": 4, "out of memory": 0}
    assert lab.free == 0  # the other process let go


@pytest.mark.parametrize(("lab", "part"), [
    (FakeLab(error=320 * MIB), "table"), (FakeLab(error=-320 * MIB), "table"), (FakeLab(allocations=1), "table"),
    (FakeLab(needs=0), "ballast"), (FakeLab(needs=LAST + 2), "ballast"), (FakeLab(leak=2 * MIB), "cycles"),
    (FakeLab(late=0.3), "turns"),
])  # fmt: skip
def test_what_is_off_fails(capsys, lab, part):
    """Too little, too much, an allocation, no refusal, no fit, 100 MiB lost in 50 cycles."""
    code, body = run(capsys, lab, part)
    assert (code, body["ok"]) == (1, False)
    assert list(body) == ["schema", "ok", "seconds", part]


def test_200_mib_are_allowed_of_small_models_and_3_percent_of_large_ones():
    assert not planner_report.off(1000 * MIB, 1200 * MIB)
    assert planner_report.off(1000 * MIB, 1201 * MIB)
    assert not planner_report.off(97 * 2**30, 100 * 2**30)
    assert planner_report.off(96 * 2**30, 100 * 2**30)


@pytest.mark.parametrize("how", ["runs_out", "breaks"])
def test_memory_that_runs_out_is_no_refusal(capsys, how):
    lab = FakeLab()
    setattr(lab, how, True)
    code, body = run(capsys, lab, "ballast")
    assert (code, body["ballast"]["counts"]["out of memory"]) == (1, 4)


def test_a_refused_case_is_named_and_fails(capsys):
    lab = FakeLab()
    lab.free = 1
    code, body = run(capsys, lab, "table", "--only", "phi-4")
    assert (code, len(body["table"]["rows"])) == (1, 1)
    assert "needs" in body["table"]["rows"][0]["error"]


def test_the_cases_are_what_was_asked_for_and_every_one_fits():
    """At least 12; all of 8, 12, 16, 24, 32 and 48 GiB; 16, 8 and 4 bit; four formats; 8B to 70B."""
    assert len(CASES) >= 12
    assert {case.gib for case in CASES} == {8, 12, 16, 24, 32, 48}
    assert {case.kv_bits for case in CASES} >= {16, 8, 4}
    assert {case.name.partition("@")[2] for case in CASES} == {"nf4", "fp16", "vq2", "mxfp4"}
    for case in CASES:
        name, _, format = case.name.partition("@")
        wishes = placement.Wishes(case.ctx, case.kv_bits, case.embed, case.head)
        plan = memory_plan.assess(catalog.find(name).arch, format, memory_plan.parse_card(str(case.gib)), wishes=wishes)
        assert plan.fits, (case, plan.reason)
        assert catalog.find(name).arch.parameters > 8e9


def test_the_ballast_leaves_too_little_first_and_enough_last():
    name, _, format = planner_report.SMALL.name.partition("@")
    fits = [
        memory_plan.assess(catalog.find(name).arch, format, size, context_bytes=0).fits
        for size in range(FIRST, LAST + 1, STEP)
    ]
    assert (fits[0], fits[-1]) == (False, True)
