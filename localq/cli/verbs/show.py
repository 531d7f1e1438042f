"""`localq show`: what is known about one model, from the catalogue and from its files where they are here."""

from __future__ import annotations

from localq.cli import options
from localq.cli.output import print_json, terminal_width
from localq.errors import usage_error
from localq.files import catalog


def show(model: options.Model = None, vram: options.Vram = None, json: options.Json = False) -> None:
    """Show what a model is, where it comes from, what of it is on this machine, and what it takes of a GPU."""
    if model is None:
        raise usage_error("localq show", "no model is named", "`localq ls` and `localq fit` list them.")
    catalog.resolve(model)
    from localq.planner import model_facts  # start-up cost: a wrong name is answered without it

    facts = model_facts.of_name(model, options.effective(vram=vram))
    if json:
        print_json(facts)
    else:
        print("\n".join(model_facts.lines(facts, terminal_width())))
