"""Writes `config.toml`: one setting at a time, keeping comments and order, or the whole text."""

from __future__ import annotations

import os
from typing import Any

from localq import places, settings
from localq.errors import LocalqError


def write(name: str, text: str | None) -> Any:
    """Set `name` in `config.toml` (None = remove), keeping comments. Returns the stored value."""
    import tomlkit  # start-up cost: only `config set` writes

    settings.check_name(name)
    settings.read_config()  # a broken file must not be overwritten
    path = places.config_file()
    document = tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()
    value = None
    if text is None:
        document.pop(name, None)
    else:
        value = settings.parse(name, text, "the command line")
        known = {key: settings.parse(key, each, str(path)) for key, each in document.unwrap().items()}
        settings.Settings(**{**known, name: value})
        document[name] = text if value is None else value  # "max": no limit
    _store(tomlkit.dumps(document))
    return value


def write_file(text: str) -> int:
    """Replace `config.toml` by `text`. Returns its number of settings.

    Raises as `settings.read_config`, and writes nothing then.
    """
    count = len(settings.parse_file(text, "the edited text"))
    _store(text if text.endswith("\n") else text + "\n")
    return count


def _store(text: str) -> None:
    path = places.config_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise LocalqError(
            str(path), f"cannot be written ({error.strerror})", "Check the folder's permissions."
        ) from error
