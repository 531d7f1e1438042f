"""A campaign of hostile runs: thousands of `localq` processes, each with something wrong, judged by one set of rules.

    python -m tests.tools.hostile_runs OUT --runs 2000 --seed 1

Run `number` has the seed SEED + number, which decides all of it: kind, trap, command. `--runs 1 --seed N` repeats it.
The kinds are model folders, hubs on loopback, files of options, settings, environments and terminals, in turn. Each run
has a scratch home with files of others, and secrets: an access token, a password in HF_ENDPOINT, a saved conversation.
The rules are in `hostile_judge`. OUT/runs.jsonl has a line a run; what broke a rule leaves OUT/SEED/ with its output.
The last line is one JSON object; the exit status is 1 where any rule was broken.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.cli.terminal_engine import Script
from tests.tools import hostile_folders, hostile_hubs, hostile_process, hostile_settings, hostile_terminals
from tests.tools.hostile_judge import judge
from tests.tools.hostile_process import Outcome, Plan
from tests.tools.hostile_scratch import Scratch, Secrets

Generator = Callable[[random.Random, Scratch], Plan]
KINDS: dict[str, Generator] = {
    "folder": hostile_folders.folder,
    "hub": hostile_hubs.plan,
    "file": hostile_folders.file,
    "settings": hostile_settings.settings,
    "environment": hostile_settings.environment,
    "terminal": hostile_terminals.plan,
}


@dataclass
class Result:
    """One run. broken: the rules, each with what broke it."""

    seed: int
    kind: str
    trap: str
    command: str
    code: int | None
    seconds: float
    cpu_s: float
    broken: list[str] = field(default_factory=list)


def kind_of(seed: int) -> str:
    """The kind of the run with that seed."""
    return list(KINDS)[seed % len(KINDS)]


def run_one(seed: int, room: Path, keep: Path | None = None) -> Result:
    """The run with that seed in `room`, an empty folder; keep: where what broke a rule leaves its output."""
    rng = random.Random(f"hostile run {seed}")
    scratch = Scratch(room / "scratch", Secrets.draw(rng)).plant()
    Script().write(scratch.script)
    kind = kind_of(seed)
    plan = KINDS[kind](rng, scratch)
    try:
        before = scratch.snapshot()
        outcome = hostile_process.run(plan, scratch)
    finally:
        plan.close()
    broken = judge(plan, scratch, before, outcome)
    words, _, _ = hostile_process.start(plan, scratch)
    result = Result(seed, kind, plan.trap, shlex.join(words), outcome.code, outcome.seconds, outcome.cpu_s, broken)
    if broken and keep is not None:
        _keep(keep / str(seed), result, plan, outcome)
    scratch.remove()
    return result


def _keep(folder: Path, result: Result, plan: Plan, outcome: Outcome) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in outcome.output.items():
        (folder / name).write_bytes(data)
    told = {**asdict(result), "environment": plan.environment, "keys": repr(plan.keys), "signal": repr(plan.signal)}
    (folder / "run.json").write_text(json.dumps(told, indent=1))


def attempt(seed: int, out: Path) -> Result:
    """A run of the campaign; one that could not be made is no run without a fault, and does not end the campaign."""
    room = out / "room"
    try:
        return run_one(seed, room, out)
    except Exception as error:
        shutil.rmtree(room, ignore_errors=True)
        why = "".join(traceback.format_exception(error))
        return Result(seed, kind_of(seed), "", "", None, 0.0, 0.0, [f"campaign: {type(error).__name__}: {why}"])


def campaign(out: Path, runs: int, seed: int) -> dict[str, object]:
    """Runs `seed` to seed + runs - 1, one after the other; how many broke which rule."""
    out.mkdir(parents=True, exist_ok=True)
    begun, rules, kinds, codes = time.monotonic(), Counter[str](), Counter[str](), Counter[str]()
    failed = []
    with (out / "runs.jsonl").open("a", encoding="utf-8") as report:
        for number in range(seed, seed + runs):
            result = attempt(number, out)
            report.write(json.dumps(asdict(result)) + "\n")
            report.flush()
            kinds[result.kind] += 1
            codes[str(result.code)] += 1
            rules.update({each.partition(":")[0] for each in result.broken})
            if result.broken:
                failed.append(number)
                print(f"{number} {result.kind}, {result.trap}: {result.command:.300}", file=sys.stderr)
                print(*(f"    {each:.600}" for each in result.broken), sep="\n", file=sys.stderr, flush=True)
    return {
        "runs": runs, "seed": seed, "kinds": dict(kinds), "codes": dict(sorted(codes.items())), "broken": dict(rules),
        "failed": failed, "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder of the report")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    report = campaign(given.out.resolve(), given.runs, given.seed)
    print(json.dumps(report))
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
