"""`localq doctor`: check the installation, the driver and the GPU. Loads no torch."""

from __future__ import annotations

from localq.cli import options
from localq.cli.output import print_json, print_line
from localq.sanitize import sanitize


def doctor(json: options.Json = False) -> None:
    """Check the installation, the driver and the GPU."""
    from localq.cli.verbs import doctor_facts, doctor_install  # start-up cost: NVML and package metadata

    facts = doctor_facts.gather()
    problem = doctor_facts.problem(facts)
    if json:
        body = {**doctor_facts.as_json(facts), **doctor_install.as_json()}
        print_json({**body, "usable": problem is None, "problem": problem.to_dict() if problem else None})
    else:
        for title, text in (*doctor_facts.lines(facts), *doctor_install.lines()):
            print_line(f"{title:<12} {sanitize(text)}")
        if problem is None:
            print_line(f"{'usable':<12} {doctor_facts.verdict(facts)}")
    if problem is not None:
        raise problem
