"""`localq show`: facts of one model, from the catalogue and from its files on this machine."""

from __future__ import annotations

import dataclasses

from localq import gpus
from localq.cli import options
from localq.cli.output import print_json, print_line, terminal_width
from localq.errors import usage_error
from localq.files import catalog
from localq.settings import OF_LOAD


def show(model: options.Model = None, vram: options.Vram = None, json: options.Json = False) -> None:
    """Show a model's size, source, local files and memory use."""
    if model is None:
        raise usage_error("localq show", "no model given", f"To list models, run `localq ls` or {gpus.fit_command()}.")
    target = catalog.resolve(model)
    from localq.planner import gguf_list, model_facts  # start-up cost: a wrong name fails without them

    settings = options.load_settings(OF_LOAD, vram=vram)
    gguf_list.check(target, dataclasses.replace(settings, offline=True), "show")
    facts = model_facts.of_name(model, settings)
    if json:
        print_json(facts)
    else:
        print_line("\n".join(model_facts.lines(facts, terminal_width())))
