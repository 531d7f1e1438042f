"""`localq config`: show, get, set, unset and edit settings, and say where the file is."""

from __future__ import annotations

from typing import Annotated

import typer

from localq import places, settings, settings_file
from localq.cli import options
from localq.cli.output import note, print_json, stdout_table
from localq.cli.pager import paged
from localq.sanitize import sanitize

config = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change the settings kept in config.toml.",
)
_Name = Annotated[str, typer.Argument(help="A setting; `localq config show` lists them.")]


@config.command()
def show(
    model: Annotated[
        str | None, typer.Argument(help="With what holds for this one.", autocompletion=options.known_names)
    ] = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also say what decided each value.")] = False,
    json: options.Json = False,
) -> None:
    """List every setting with its value; of MODEL also what models.toml and its generation_config.json say."""
    found = settings.origins()
    if model is not None:
        found = _with_those_of(model, found)
    project, _ = settings.read_project()
    if json:
        told = {name: {"value": entry.value, "origin": entry.source} for name, entry in found.items()}
        files = {"path": str(places.config_file()), "project": str(project) if project else None}
        print_json({**files, "model": model, "settings": told})
        return
    headers = ["setting", "value", *(["origin"] if origin else []), "meaning"]
    rows = [
        [name, _text(entry.value), *([entry.source] if origin else []), settings.DESCRIPTIONS[name]]
        for name, entry in found.items()
    ]
    with paged():
        stdout_table(headers, rows)


def _with_those_of(model: str, found: dict[str, settings.Origin]) -> dict[str, settings.Origin]:
    """`found`, with the model's own values where nobody has said otherwise."""
    from localq.chat import default_sampling  # start-up cost: only asked for here
    from localq.files import catalog, model_folder
    from localq.files.hub import fetch as hub

    target = catalog.resolve(model)
    path = hub.local_path(target)
    generation = model_folder.open_model(path).generation_config if path is not None else None
    if generation is None:
        note(f"{target.name} is not on this machine: what its generation_config.json says is not known")
    own = default_sampling.origins(target.entry, generation)
    unset = {name: origin for name, origin in own.items() if found[name].value is None}
    return {**found, **unset, "model": settings.Origin(target.name, "argument")}


@config.command()
def get(name: _Name, json: options.Json = False) -> None:
    """Print the value of one setting."""
    settings.check_name(name)
    if json:
        found = settings.origins()[name]
        print_json({"name": name, "value": found.value, "origin": found.source})
        return
    print(sanitize(_text(settings.origins()[name].value)))  # a project's file may have said it


@config.command(name="set")
def set_(name: _Name, value: Annotated[str, typer.Argument(help="Its new value.")], json: options.Json = False) -> None:
    """Store one setting in config.toml."""
    stored = settings_file.write(name, value)
    if json:
        print_json({"name": name, "value": stored})
    else:
        print(f"{name} = {_text(stored)}")


@config.command()
def unset(name: _Name, json: options.Json = False) -> None:
    """Remove one setting from config.toml."""
    settings_file.write(name, None)
    if json:
        print_json({"name": name, "value": None})


@config.command()
def edit() -> None:
    """Change config.toml in $VISUAL or $EDITOR; what is no setting is refused, and the file stays as it was."""
    from localq.chat.terminal import editor  # start-up cost: only asked for here

    text = editor.edited(settings.file_text(), "`localq config set NAME VALUE` changes one setting.")
    print(f"{settings_file.write_file(text)} settings in {places.config_file()}")


@config.command()
def path(json: options.Json = False) -> None:
    """Print where config.toml is."""
    if json:
        print_json({"path": str(places.config_file())})
    else:
        print(places.config_file())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "; ".join(f"{name}={each}" for name, each in value.items())
    return "" if value is None else str(value)
