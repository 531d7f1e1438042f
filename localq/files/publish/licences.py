"""Licences of source models: whether a quantized model may be passed on, and what must come along.

The table is `data/licences.toml`; its head describes the fields. An id that is not in it is unknown: its conditions are
not checked, so the user has to name it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from localq import places, toml_files
from localq.errors import LocalqError, usage_error

TABLE = places.PACKAGE_DATA / "licences.toml"


@dataclass(frozen=True)
class Terms:
    """Terms of one licence, as the table has them. is_known: False for an id that is not in the table."""

    id: str
    name: str
    source: str = ""
    forbids: str = ""
    hub: bool = True
    conditions: tuple[str, ...] = ()
    notice: str = ""
    display: str = ""
    prefix: str = ""
    copy: bool = False
    is_known: bool = True


@functools.cache
def table(path: Path = TABLE) -> dict[str, Terms]:
    """Id -> terms of every licence in the table."""
    body = toml_files.parse(toml_files.read(path) or "", str(path))
    rows = ({**each, "conditions": tuple(each.get("conditions", ()))} for each in body["licence"])
    return {each["id"]: Terms(**each) for each in rows}


_NO_LICENCE = ("other", "unknown")  # ids of the hub that state nothing


def id_of(stated: object) -> str:
    """A stated id as the table writes ids; "" for one that states nothing."""
    found = stated.strip().casefold() if isinstance(stated, str) else ""
    return "" if found in _NO_LICENCE else found


def ids_of(text: str, stated: Collection[str] = ()) -> tuple[str, ...]:
    """The ids in a text that has commas between them; one of `stated` may have commas itself."""
    whole = id_of(text)
    return (whole,) if whole in stated else tuple(dict.fromkeys(filter(None, map(id_of, text.split(",")))))


def terms_of(id: str) -> Terms:
    """The terms of a licence; those of an unknown id have no conditions that localq knows."""
    known = table().get(id.strip().casefold())
    return known or Terms(id.strip(), id.strip(), hub=False, is_known=False)


def check(terms: Terms, what: str, repo: str) -> None:
    """Check that a model made from `what` may be passed on as `repo`.

    Raises LocalqError: exit 1 for a licence that forbids it, 2 for a name that it does not allow.
    """
    if terms.forbids:
        why = f"its licence, {terms.name}, does not allow redistribution: {terms.forbids} ({terms.source})"
        raise LocalqError(what, why, "Use the model on your own machines, or ask its owner for permission.")
    org, _, name = repo.partition("/")
    if terms.prefix and not name.casefold().startswith(terms.prefix.casefold()):
        why = f"the {terms.name} requires a name that begins with {terms.prefix} ({terms.source})"
        raise usage_error(repo, why, f"Use {org}/{terms.prefix}-{name}, for example.")
