"""`localq config`: show, get, set, unset and edit settings, and say where the file is."""

from __future__ import annotations

from typing import Annotated

import typer

from localq import places, settings
from localq.cli.output import print_json, stdout_table

config = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and change the settings kept in config.toml.",
)
_Name = Annotated[str, typer.Argument(help="A setting; `localq config show` lists them.")]


@config.command()
def show(
    origin: Annotated[bool, typer.Option("--origin", help="Also say what decided each value.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List every setting with its value."""
    found = settings.origins()
    if json:
        rows = {name: {"value": entry.value, "origin": entry.source} for name, entry in found.items()}
        print_json({"path": str(places.config_file()), "settings": rows})
        return
    headers = ["setting", "value", *(["origin"] if origin else []), "meaning"]
    stdout_table(
        headers,
        [
            [name, _text(entry.value), *([entry.source] if origin else []), settings.DESCRIPTIONS[name]]
            for name, entry in found.items()
        ],
    )


@config.command()
def get(name: _Name) -> None:
    """Print the value of one setting."""
    settings.check_name(name)
    print(_text(settings.origins()[name].value))


@config.command(name="set")
def set_(name: _Name, value: Annotated[str, typer.Argument(help="Its new value.")]) -> None:
    """Store one setting in config.toml."""
    print(f"{name} = {_text(settings.write(name, value))}")


@config.command()
def unset(name: _Name) -> None:
    """Remove one setting from config.toml."""
    settings.write(name, None)


@config.command()
def edit() -> None:
    """Change config.toml in $VISUAL or $EDITOR; what is no setting is refused, and the file stays as it was."""
    from localq import editor  # start-up cost: only asked for here

    text = editor.edited(settings.file_text(), "`localq config set NAME VALUE` changes one setting.")
    print(f"{settings.write_file(text)} settings in {places.config_file()}")


@config.command()
def path() -> None:
    """Print where config.toml is."""
    print(places.config_file())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "; ".join(f"{name}={each}" for name, each in value.items())
    return "" if value is None else str(value)
