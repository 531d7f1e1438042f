"""`localq config`: show, get, set, unset and edit settings, and print the path of the file."""

from __future__ import annotations

from typing import Annotated

import typer

from localq import places, settings, settings_file
from localq.cli import options
from localq.cli.output import note, print_json, print_line, stdout_table
from localq.cli.pager import page_output

config = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change settings (config.toml).",
)
_Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a setting; `localq config show` lists all settings.")
]


@config.command()
def show(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Include this model's defaults.", autocompletion=options.complete_names),
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also print where each value comes from.")] = False,
    json: options.Json = False,
) -> None:
    """List all settings and their values.

    With MODEL, include its sampling defaults from models.toml and generation_config.json.
    """
    found = settings.origins()
    if model is not None:
        found = _with_those_of(model, found)
    project, _ = settings.read_project()
    if json:
        values = {name: {"value": entry.value, "origin": entry.source} for name, entry in found.items()}
        files = {"path": str(places.config_file()), "project": str(project) if project else None}
        print_json({**files, "model": model, "settings": values})
        return
    headers = ["setting", "value", *(["origin"] if origin else []), "meaning"]
    rows = [
        [name, _text(name, entry.value), *([entry.source] if origin else []), settings.DESCRIPTIONS[name]]
        for name, entry in found.items()
    ]
    with page_output():
        stdout_table(headers, rows)
    options.note_project({name: entry for name, entry in found.items() if entry.is_project})


def _with_those_of(model: str, found: dict[str, settings.Origin]) -> dict[str, settings.Origin]:
    """`found`, with the model's own values for settings that are unset."""
    from localq.chat import default_sampling  # start-up cost: only needed here
    from localq.files import catalog, model_folder
    from localq.files.hub import fetch as hub

    target = catalog.resolve(model)
    path = hub.local_path(target)
    generation = model_folder.open_model(path).generation_config if path is not None else None
    if generation is None:
        note(f"{target.name} is not on this machine, so its generation_config.json is not included")
    own = default_sampling.origins(target.entry, generation)
    unset = {name: origin for name, origin in own.items() if found[name].value is None}
    return {**found, **unset, "model": settings.Origin(target.name, "argument")}


@config.command()
def get(name: _Name, json: options.Json = False) -> None:
    """Print the value of one setting."""
    settings.check_name(name)
    found = settings.origins()[name]
    if json:
        print_json({"name": name, "value": found.value, "origin": found.source})
        return
    print_line(_text(name, found.value))
    if found.is_project:
        options.note_project({name: found})


@config.command(name="set")
def set_(
    name: _Name,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="The new value.")],
    json: options.Json = False,
) -> None:
    """Store a setting in config.toml."""
    stored = settings_file.write(name, value)
    if json:
        print_json({"name": name, "value": stored})
    else:
        print_line(f"{name} = {_text(name, stored)}")


@config.command()
def unset(name: _Name, json: options.Json = False) -> None:
    """Remove a setting from config.toml."""
    settings_file.write(name, None)
    if json:
        print_json({"name": name, "value": None})


@config.command()
def edit() -> None:
    """Edit config.toml in $VISUAL or $EDITOR.

    If the edited file has an unknown setting or an invalid value, it is rejected and the original is kept.
    """
    from localq.chat.terminal import editor  # start-up cost: only needed here

    before = settings.file_text()
    text = editor.edit(before, "Use `localq config set NAME VALUE` instead.")
    print_line(f"{settings_file.write_file(text, before)} settings in {places.config_file()}")


@config.command()
def path(json: options.Json = False) -> None:
    """Print the path to config.toml."""
    if json:
        print_json({"path": str(places.config_file())})
    else:
        print_line(str(places.config_file()))


def _text(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "; ".join(f"{key}={each}" for key, each in value.items())
    if name in ("max_tokens", "think_budget") and isinstance(value, int):
        return settings.max_tokens_text(value)
    return "" if value is None else str(value)
