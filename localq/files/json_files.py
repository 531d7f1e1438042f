"""JSON files from untrusted model folders: bounded, strict, and inside the folder.

Accepted is only a regular file of the folder, or one that a link of its user points to (`inside`), within its size
limit, in UTF-8 (a byte order mark is skipped), with a JSON object without duplicate keys, NaN, Infinity, numbers of
many digits or lone surrogates, and not nested deeply. Everything else is a `LocalqError` with exit code 8; for what an
editor leaves in a file, it says what to change there. A file that the system does not let this user read is one with
exit code 9. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from localq import disk, toml_files
from localq.errors import bad_file

DAMAGED = "Download the file again; if the error persists, localq cannot use this model."
EDITED = "If you edited the file, fix it; otherwise, download it again."
_BOM = "\ufeff"  # begins files that some editors write
# More than any file of a model has. Counted before the JSON is parsed, to bound its time and memory.
MAX_CHARACTERS = {"{": 2**16, "[": 2**17, ",": 2**20}
MAX_DEPTH = 64  # of objects and lists in each other; configurations have about 6
MAX_DIGITS = 128  # of a number; a longer one can be too large for a float
MAX_TARGET = 200  # characters of a link's target in a message
_CONTENT_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # a sha256 or git id in hex
_NO_BRACKET = re.compile(r'(?:"(?:[^"\\]++|\\(?s:.))*+"?+|[^\[\]{}"]++)++')
_HALF = re.compile(r"\\u[dD][89a-fA-F]")  # one half of a surrogate pair as JSON escapes it


def inside(folder: Path, name: str) -> Path | None:
    """The regular file `folder/name`, links resolved; None where the folder has no such name.

    Who made a link decides how far it is followed. What came from a repository stays there: a link in a snapshot
    folder of the Hugging Face cache (`models--*/snapshots/<revision>`) may lead anywhere in that cache, and one in a
    folder that is itself a git checkout anywhere in it. In any other folder the user made the links, to files on
    another disk or in a cache: they may lead to any file of the same kind, by its extension or by the name that caches
    give to content.

    Raises LocalqError (exit 8) for other links, and for anything but a regular file.
    """
    path = folder / name
    if not os.path.lexists(path):
        return None
    try:
        resolved = path.resolve(strict=True)
        mode = resolved.stat().st_mode
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links (pathlib, Python < 3.13)
        step = "Restore the target of the link, or replace the link with the file."
        raise bad_file(str(path), f"the link is broken ({_target(path)})", step) from error
    if not stat.S_ISREG(mode):
        raise bad_file(str(path), "not a regular file", DAMAGED)
    _check_link(folder, path, resolved)
    return resolved


def _check_link(folder: Path, path: Path, resolved: Path) -> None:
    """Refuse links that lead too far, as `inside` says."""
    root, step = folder.resolve(), "Replace the link with the file."
    if resolved.is_relative_to(root):
        return
    why = f"the symbolic link points outside the model folder ({_target(path)})"
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        blobs = (root.parent.parent / "blobs").resolve()  # may be a link to another disk, which no repository makes
        if not resolved.is_relative_to(root.parent.parent.parent) and not resolved.is_relative_to(blobs):
            raise bad_file(str(path), why, step)
    elif (root / ".git").exists():
        raise bad_file(str(path), why, f"{step[:-1]}, or remove .git if you created the link yourself.")
    elif resolved.suffix != path.suffix and not _CONTENT_NAME.fullmatch(resolved.name):
        raise bad_file(
            str(path),
            f"the symbolic link points to a file whose name does not end in {path.suffix} ({_target(path)})",
            step,
        )


def _target(path: Path) -> str:
    try:
        return f"to {os.readlink(path)}"[:MAX_TARGET]
    except OSError:  # a folder on the way is the link
        return f"to {os.path.realpath(path)}"[:MAX_TARGET]


def read_text(path: Path, max_bytes: int) -> str:
    """The UTF-8 text of a file of at most `max_bytes`, without a byte order mark."""
    try:
        raw = disk.read_regular(path, max_bytes + 1)
    except disk.NotRegularError as error:
        raise bad_file(str(path), "not a regular file", DAMAGED) from error
    except OSError as error:
        raise disk.read_error(path, error) from error
    if len(raw) > max_bytes:
        raise bad_file(str(path), f"too large (limit for this kind of file: {max_bytes:,} bytes)", DAMAGED)
    try:
        return raw.decode("utf-8").removeprefix(_BOM)
    except UnicodeDecodeError as error:
        raise bad_file(str(path), f"not UTF-8 text ({error.reason} at byte {error.start})", DAMAGED) from error


def parse_object(text: str, what: str, damaged: str = DAMAGED) -> dict[str, Any]:
    """The JSON object in `text`; `what` names the source in errors, `damaged` is their advice for malformed JSON."""
    if any(text.count(character) > most for character, most in MAX_CHARACTERS.items()):
        raise bad_file(what, "too many objects or lists", DAMAGED)
    if text.count("{") + text.count("[") > MAX_DEPTH and toml_files.is_deep(_NO_BRACKET.sub("", text), MAX_DEPTH):
        raise bad_file(what, "nested too deeply", DAMAGED)
    hooks: dict[str, Any] = {"parse_constant": _no_constant, "parse_int": _integer, "parse_float": _decimal}
    try:
        value = json.loads(text, object_pairs_hook=_unique, **hooks)
    except RecursionError as error:  # called from deep within
        raise bad_file(what, "nested too deeply", DAMAGED) from error
    except _EditError as error:
        raise bad_file(what, error.why, error.advice if damaged == EDITED else damaged) from error
    except ValueError as error:  # covers JSONDecodeError
        raise bad_file(what, f"not valid JSON ({error})", damaged) from error
    if not isinstance(value, dict):
        raise bad_file(what, f"expected a JSON object, but found a JSON {type(value).__name__}", DAMAGED)
    if _HALF.search(text) and not _is_text(json.dumps(value, ensure_ascii=False)):
        raise bad_file(what, "invalid text (unpaired surrogate)", DAMAGED)  # cannot be encoded as UTF-8
    return value


def read_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file of at most `max_bytes`."""
    return parse_object(read_text(path, max_bytes), str(path), EDITED)


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _EditError(ValueError):
    """JSON that Python reads and localq does not."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(why)
        self.why, self.advice = why, advice


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _EditError(f"duplicate key {key[:80]!r} in one object", "Remove one of the duplicates.")
    return fields


def _integer(digits: str) -> int:
    _check_digits(digits)
    return int(digits)


def _decimal(digits: str) -> float:
    _check_digits(digits)
    value = float(digits)
    if math.isinf(value):
        raise _EditError(f"the number {digits} is too large", "Replace it with a smaller number, or with null.")
    return value


def _check_digits(digits: str) -> None:
    if len(digits) > MAX_DIGITS:
        raise _EditError(f"a number has too many digits ({len(digits):,})", "Shorten it in the file.")


def _no_constant(literal: str) -> NoReturn:
    why = f"{literal} is not valid in JSON"
    raise _EditError(why, "Replace it with a number, or with null.")
