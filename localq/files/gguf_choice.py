"""The models among the .gguf files of a repository or folder: one choice a quantization, named by its tag.

    NAME-Q4_K_M.gguf, NAME.Q4_K_M.gguf     the tag Q4_K_M
    NAME-UD-Q4_K_XL.gguf                   the tag UD-Q4_K_XL
    Q4_K_M/NAME-00001-of-00003.gguf        one of three parts of a model; the tag may be that of the folder
    mmproj-*.gguf, *imatrix*.gguf          no model: a vision projector, and statistics of a calibration text

Names only: nothing is read. Torch-free.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from localq.errors import ExitCode, LocalqError
from localq.files.gguf.splits import PART_NAME

SUFFIX = ".gguf"
DEFAULT_TAG = "Q4_K_M"  # what llama.cpp and ollama take where no tag is given
LATEST = "latest"  # ollama's word for "no tag"
SHOWN = 40  # names in a message
_TAG = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:I?Q[1-9]_[A-Z0-9]{1,4}(?:_[A-Z0-9]{1,4})*|TQ[12]_0|(?:MX|NV)FP4(?:_MOE)?|BF16|FP?(?:16|32))"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE,
)
_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])", re.IGNORECASE)
_STATISTICS = re.compile(r"(?<![a-z0-9])imatrix(?![a-z0-9])", re.IGNORECASE)


@dataclass(frozen=True)
class GgufChoice:
    """One model in GGUF.

    tag    its quantization in capitals; empty if its name states none
    label  what chooses it: the tag, or the name of its first file if it has no tag or shares it
    files  its file, or its parts in order
    """

    tag: str
    label: str
    files: tuple[str, ...]

    def name(self, repo: str, revision: str | None = None) -> str:
        """Its name on the command line."""
        return name_of(repo, revision, self.label)


class SeveralGgufError(LocalqError):
    """A repository or folder with several GGUF models, of which none was named (exit 2)."""

    def __init__(self, repo: str, choices: Iterable[GgufChoice]) -> None:
        self.choices = tuple(choices)
        why = f"found {len(self.choices)} GGUF models ({listed(self.choices)})"
        step = f"Select one by its tag, for example {best(self.choices).name(repo)}."
        super().__init__(repo, why, step, ExitCode.USAGE)


def name_of(repo: str, revision: str | None, label: str) -> str:
    """The name of a choice of a repository: ORG/REPO:TAG, ORG/REPO/FILE, or ORG/REPO@REVISION:TAG or :FILE."""
    if revision is not None:
        return f"{repo}@{revision}:{label}"
    return f"{repo}{'/' if label.casefold().endswith(SUFFIX) else ':'}{label}"


def canonical(wanted: str) -> str:
    """A tag or file name as it is shown: tags in capitals, and nothing for "latest"."""
    if wanted.casefold() == LATEST:
        return ""
    return wanted.upper() if _TAG.fullmatch(wanted) else wanted


def is_model(name: str) -> bool:
    """Return whether a file of this name is a GGUF model, or a part of one."""
    base = PurePosixPath(name).name
    if not base.casefold().endswith(SUFFIX) or _PROJECTOR.search(name):
        return False
    return not _STATISTICS.search(base) or bool(_TAG.search(base))  # a model made with an imatrix may say so


def tag_of(name: str) -> str:
    """The quantization tag of a file: the last one in its name, else in that of its folder; empty without one."""
    path = PurePosixPath(name)
    found = _TAG.findall(stem_of(path.name)) or _TAG.findall(path.parent.name)
    return found[-1].upper() if found else ""


def stem_of(name: str) -> str:
    """The name of a file without its suffix and the number of its part."""
    part = PART_NAME.fullmatch(name)
    return part["stem"] if part else name[: -len(SUFFIX)] if name.casefold().endswith(SUFFIX) else name


def choices(names: Iterable[str], *, incomplete: bool = False) -> list[GgufChoice]:
    """The models among files of these names. A split model without all its parts counts only if `incomplete`."""
    sets: dict[tuple[str, int], list[str]] = {}
    for name in sorted(names):
        if is_model(name):
            part = PART_NAME.fullmatch(name)
            sets.setdefault((part["stem"], int(part["count"])) if part else (name, 1), []).append(name)
    single = {stem_of(stem) for stem, count in sets if count == 1}  # published whole and in parts: whole
    kept = [files for (stem, count), files in sets.items() if count == 1 or stem not in single]
    found = [(tag_of(files[0]), tuple(files)) for files in kept if incomplete or is_whole(files)]
    tags = Counter(tag for tag, _ in found)
    return [GgufChoice(tag, tag if tag and tags[tag] == 1 else files[0], files) for tag, files in found]


def is_whole(files: Iterable[str]) -> bool:
    """Return whether the sorted files are all parts of a model; a file that is no part is a whole model."""
    parts = [PART_NAME.fullmatch(name) for name in files]
    if parts == [None]:
        return True
    numbers = [(int(part["number"]), int(part["count"])) for part in parts if part is not None]
    return numbers == [(number, len(parts)) for number in range(1, len(parts) + 1)]


def select(found: Iterable[GgufChoice], wanted: str, repo: str) -> GgufChoice:
    """The choice that a tag or file name means, in any case.

    A tag is also found within a name: Q4_K_XL means UD-Q4_K_XL where there is no other. Raises LocalqError: exit 4 if
    there is none, 2 for several.
    """
    known = list(found)
    matches = _matches(known, wanted)
    if not matches:
        has = f"available: {listed(known)}" if known else "the repository has no GGUF model"
        step = f"Use one of these, for example {best(known).name(repo)}." if known else "Use another repository."
        raise LocalqError(repo, f"no GGUF model matches {wanted[:128]}; {has}", step, ExitCode.UNKNOWN_MODEL)
    if len(matches) > 1:
        why = f"{wanted[:128]} matches {len(matches)} GGUF models ({listed(matches)})"
        raise LocalqError(
            repo, why, f"Select one by its full name, for example {matches[0].name(repo)}.", ExitCode.USAGE
        )
    return matches[0]


def find(names: Iterable[str], wanted: str) -> tuple[str, ...]:
    """The files of the one model that a tag or file name means; () for none, for several, and for one in parts."""
    matches = _matches(choices(names), wanted)
    return matches[0].files if len(matches) == 1 else ()


def means(wanted: str, choice: GgufChoice) -> bool:
    """Return whether a tag or file name can mean this choice."""
    return bool(_matches([choice], wanted))


def _matches(known: list[GgufChoice], wanted: str) -> list[GgufChoice]:
    asked = wanted.casefold()
    if asked.endswith(SUFFIX):
        exact = [each for each in known if wanted in each.files]
        return exact or [each for each in known if any(asked in _names(file) for file in each.files)]
    if tagged := [each for each in known if each.tag.casefold() == asked]:
        return tagged
    word = re.compile(rf"(?<![a-z0-9_]){re.escape(asked)}(?![a-z0-9_])")
    return [each for each in known if word.search(stem_of(each.files[0]).casefold())]


def _names(file: str) -> tuple[str, str]:
    return file.casefold(), PurePosixPath(file).name.casefold()


def best(found: Iterable[GgufChoice]) -> GgufChoice:
    """The choice that llama.cpp takes without a tag: Q4_K_M, else the first."""
    known = list(found)
    return next((each for each in known if each.tag == DEFAULT_TAG), known[0])


def listed(found: Iterable[GgufChoice]) -> str:
    """The labels of choices for a message."""
    labels = sorted(each.label for each in found)
    return f"{', '.join(labels[:SHOWN])}{', ...' if len(labels) > SHOWN else ''}"


def parts_of(path: Path) -> list[Path]:
    """The files of the model at `path`: itself, and the other parts of a split model that are beside it."""
    part = PART_NAME.fullmatch(path.name)
    if part is None:
        return [path]
    count = min(int(part["count"]), 10_000)
    names = (f"{part['stem']}-{number:05}-of-{part['count']}{path.suffix}" for number in range(1, count + 1))
    named = [path.with_name(name) for name in names]
    return [each for each in named if each == path or each.is_file()]
