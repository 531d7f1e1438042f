"""Values of the settings form: texts of its fields, parsing, applying, saving. Without widgets.

A text is a value as in `localq config set`; an empty one is the model's default, or unset.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localq import sampling, settings, settings_file
from localq.chat import default_sampling, stop_strings
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.files import model_folder
from localq.sampling import Sampling
from localq.settings import Settings, max_tokens_text

SAMPLING = tuple(sampling.LIMITS)
LIMITS = ("max_tokens", "think_budget")  # in tokens; empty: unset
LINES = (*SAMPLING, *LIMITS)  # fields of one line
CHOICES = ("theme", "ui")
NAMES = (*LINES, "stop", "system", *CHOICES)
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}


@dataclass(frozen=True)
class Form:
    """Parsed values, and errors by field; with errors nothing is applied."""

    sampling: Sampling
    max_tokens: int | None
    think_budget: int | None
    stop: tuple[str, ...]
    system: str | None
    errors: dict[str, LocalqError] = field(default_factory=dict)


def own_defaults(session: ChatSession | None) -> Sampling:
    """The model's default sampling; greedy without a model or with unreadable files."""
    if session is None or not session.request.path:
        return Sampling()
    entry = default_sampling.catalog_entry(session.record.model)
    try:
        return default_sampling.sampling(entry, model_folder.open_model(Path(session.request.path)).generation_config)
    except LocalqError:  # reported when the model was opened
        return Sampling()


def field_texts(session: ChatSession | None, chosen: Settings, defaults: Sampling) -> dict[str, str]:
    """Initial texts of the fields: the current values, empty where they are the model's defaults.

    A value that the user set is shown even if it equals the default, since it applies to other models.
    """
    now = session.sampling if session is not None else chosen.sampling(defaults)
    silent = {name: getattr(defaults, name) for name in SAMPLING if getattr(chosen, name) is None}
    found = {name: _text(getattr(now, name), silent.get(name)) for name in SAMPLING}
    for name in LIMITS:
        most = getattr(chosen if session is None else session, name)
        found[name] = "" if most is None else max_tokens_text(most)
    found["stop"] = "\n".join(map(_escape, session.stop_strings)) if session is not None else ""
    found["system"] = (session.system if session is not None else chosen.system) or ""
    return {**found, "theme": chosen.theme, "ui": chosen.ui}


def read(written: Mapping[str, str], defaults: Sampling) -> Form:
    """Parse the fields. Raises nothing; `errors` has the invalid ones."""
    errors: dict[str, LocalqError] = {}
    values = dataclasses.asdict(defaults)
    for name in SAMPLING:
        try:
            values[name] = _value(name, written[name], values[name])
            dataclasses.replace(defaults, **{name: values[name]})
        except LocalqError as error:
            errors[name], values[name] = error, getattr(defaults, name)
    limits, stop = dict[str, Any](), tuple[str, ...]()
    for name in LIMITS:
        try:
            limits[name] = getattr(Settings(**{name: _value(name, written[name], None)}), name)
        except LocalqError as error:
            errors[name], limits[name] = error, None
    try:
        stop = stop_strings.validate([_unescape(line) for line in written["stop"].split("\n") if line])
    except LocalqError as error:
        errors["stop"] = error
    system = written["system"].strip() or None
    return Form(Sampling(**values), limits["max_tokens"], limits["think_budget"], stop, system, errors)


def apply(form: Form, session: ChatSession) -> str | None:
    """Apply to the next reply; return a notice where saving fails."""
    assert not form.errors, "checked by the screen"
    session.sampling, session.max_tokens, session.think_budget = form.sampling, form.max_tokens, form.think_budget
    session.stop_strings, session.system = form.stop, form.system
    return session.try_save()


def save_as_default(written: Mapping[str, str], foreign: Collection[str] = ()) -> list[str]:
    """Write the fields to config.toml, for every model; empty ones are removed. Returns the changed names.

    Stop strings belong to a conversation, and the fields `foreign` to a project's file, which is not trusted to decide
    for other folders. Raises LocalqError where the file cannot be read or written; then nothing is changed.
    """
    known, changed = settings.read_config(), dict[str, str | None]()
    built_in = dataclasses.asdict(Settings())
    for name in (*LINES, "system", *CHOICES):
        text = written[name].strip()
        if name in foreign:
            continue
        if text and settings.parse(name, text, "this field") != known.get(name, built_in[name]):
            changed[name] = text
        elif not text and name in known:
            changed[name] = None
    settings_file.write_all(changed)
    return list(changed)


def _value(name: str, text: str, otherwise: Any) -> Any:
    return settings.parse(name, text.strip(), "this field") if text.strip() else otherwise


def _text(value: object, otherwise: object) -> str:
    return "" if value is None or value == otherwise else str(value)


def _escape(stop: str) -> str:
    return stop.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")


def _unescape(line: str) -> str:
    return re.sub(r"\\[nt\\]", lambda found: _ESCAPES[found[0]], line)
