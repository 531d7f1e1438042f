"""What `localq quantize` records of a conversion: the command without paths, and the text. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localq.cli.verbs.quantize_calibrated import NO_TEXT, CalibrationOptions
from localq.files.publish.record import ConversionRecord, describe

_DEFAULT_TEXT = "WikiText-2 (a slice of the training split that localq includes)"


def words(**options: Any) -> tuple[str, ...]:
    """The options of the command line that were given, as words; of files only their names."""
    found: list[str] = []
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            found.append(option)
        elif isinstance(value, tuple):
            found += [word for each in value for word in (option, each.name)]
        elif value is not None and value is not False:
            found += [option, value.name if isinstance(value, Path) else str(value)]
    return tuple(found)


def record(
    source: str,
    path: Path,
    format: str,
    options: Sequence[str],
    asked: CalibrationOptions,
    windows: Sequence[Sequence[int]] = (),
) -> ConversionRecord:
    """The record of quantizing `source`, whose files are at `path`.

    options   as `words` returns them
    windows   the calibration tokens; none for a conversion without a text
    """
    from localq.files import catalog  # start-up cost: only a conversion needs it

    text = f"existing layers ({asked.layers.name})" if asked.layers is not None and not windows else ""
    if windows:
        names = [each.name for each in asked.calibration or () if each != NO_TEXT]
        counted = f"{len(windows)} window{'s' * (len(windows) > 1)} of {len(windows[0])} tokens"
        text = f"{counted} from {', '.join(names) or _DEFAULT_TEXT}"
    return replace(describe(catalog.resolve(source), path, format, options), calibration=text or "none")
