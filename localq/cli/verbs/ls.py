"""`localq ls`: the models on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from localq import gpus
from localq.cli import options
from localq.cli.output import note, print_json, stdout_table
from localq.wording import human_bytes, local_time

if TYPE_CHECKING:
    from localq.errors import LocalqError
    from localq.files.local_models import LocalModel


def ls(json: options.Json = False) -> None:
    """List the models on this machine, most recently used first.

    SHARED marks models that another program downloaded and may still use. Models named ollama/... and lm-studio/...
    belong to ollama and LM Studio; localq uses them in place and never changes or deletes them.
    """
    from localq.files import local_models  # start-up cost: `localq --help` does without it

    here = local_models.inventory()
    models = here.models
    if json:
        unreadable = [unreadable_fields(each.error) for each in here.unreadable]
        print_json({"models": [fields(model) for model in models], "unreadable": unreadable})
        return
    for each in here.unreadable:
        note(str(each.error))
    if not models:
        from localq.files import packaged_model  # start-up cost: a list does without it

        note(
            f"no models yet; {gpus.fit_command()} lists the models that your GPU can run; the "
            f"small model smollm2-135m {packaged_model.BUILT_IN}"
        )
        return
    rows = [
        [row.name, _format(row), human_bytes(row.bytes), "yes" if row.shared else "no", _day(row), str(row.path)]
        for row in models
    ]
    stdout_table(["NAME", "FORMAT", "SIZE", "SHARED", "LAST USED", "PATH"], rows, right=frozenset({2}))


def fields(model: LocalModel) -> dict[str, Any]:
    """A model as `--json` prints it."""
    return {
        "name": model.name,
        "format": model.format,
        "bytes": model.bytes,
        "path": str(model.path),
        "where": model.where,
        "complete": model.complete,
        "shared": model.shared,
        "last_used_unix_s": int(model.last_used),
        "repo": model.repo or None,
        "commit": model.commit or None,
    }


def unreadable_fields(error: LocalqError) -> dict[str, Any]:
    """A model that cannot be read, as `--json` prints it."""
    return {"name": error.what, "reason": error.why}


def _format(model: LocalModel) -> str:
    return model.format if model.complete else f"{model.format}, incomplete"


def _day(model: LocalModel) -> str:
    return local_time(model.last_used, "%Y-%m-%d") if model.last_used else "-"
