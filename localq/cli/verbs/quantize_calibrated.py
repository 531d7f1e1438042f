"""What `localq quantize` is asked for of formats that are made on a text: bits, the text, effort. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq.errors import usage_error

if TYPE_CHECKING:
    from localq.quantize.settings import Effort, Tuning

SCHEMES = {"2": "s4l16", "2.5": "s4l16+s16l16", "3": "s4l16+s8l16", "4": "s4l16+s4l16"}  # of vq2, by bits
QUICK_WINDOWS = 64
WEIGHED_WINDOWS = 16  # of `prepare.WEIGHED`: moments of inputs need fewer
NO_TEXT = Path("none")
_OF_TEXT = ("--calibration", "--windows", "--device")
_OF_TRAINING = ("--best", *_OF_TEXT, "--vram")  # of layers that are there
BEST_BEAM, BEST_ROUNDS = 64, 2
BEST_STEPS, BEST_SEQUENCES = 200, 4  # of fine-tuning
WHOLE_PASSES, WHOLE_SEQUENCES = 2, 2  # of training all layers
WHOLE_RATES = (1e-3, 5e-4, 5e-4)  # of its codebooks, scales, norms
LARGEST_SEED = 2**31 - 1

_BITS = "Of vq2: 2 (default), 2.5, 3 or 4; of bcq 1 to 5; or in between, as 2.3: more where it is worth most."
Bits = Annotated[str | None, typer.Option("--bits", metavar="NUMBER", help=_BITS)]
_TEXT = (
    "Plain text, or chats (.jsonl), unlike what to judge by; default is localq's own; may be repeated. Of bcq and "
    "squeezellm also none, for no text at all."
)
Calibration = Annotated[list[Path] | None, typer.Option("--calibration", metavar="FILE", help=_TEXT)]
Windows = Annotated[int | None, typer.Option("--windows", min=1, help="How many of its windows of 2048 tokens.")]
_BEST = "A wider search, twice, on all of the text, and training: hours without a GPU. With --layers training alone."
Best = Annotated[bool, typer.Option("--best", help=_BEST)]
Quick = Annotated[bool, typer.Option("--quick", help="The opposite of --best, which vq2 and aqlm2x8 have by default.")]
Seed = Annotated[
    int | None, typer.Option("--seed", min=0, max=LARGEST_SEED, help="Of the rotations of vq2 and aqlm2x8.")
]
_LAYERS = "Of vq2: layers from here, made before of the same SOURCE; embedding and head are made. --best trains them."
Layers = Annotated[Path | None, typer.Option("--layers", metavar="FOLDER", help=_LAYERS)]


@dataclass(frozen=True)
class Calibrated:
    """What was asked of a format that is made on a text; None where nothing was."""

    bits: str | None
    calibration: tuple[Path, ...] | None
    windows: int | None
    best: bool | None
    device: str | None
    seed: int | None
    vram: str | None
    layers: Path | None = None

    def check(self, format: str, calibrated: tuple[str, ...], mixing: bool = False) -> None:
        """Raises LocalqError (exit 2) for options that `format` does not have, and for bits that there are not."""
        given = {f"--{name}": value for name, value in vars(self).items() if value is not None}
        if "--best" in given and not self.best:
            given = {"--quick" if name == "--best" else name: value for name, value in given.items()}
        from localq.planner import prepare  # start-up cost

        if format in prepare.WEIGHED:
            if other := given.keys() - set(_OF_TEXT):
                why = f"{format} has no such option"
                raise usage_error(min(other), why, "It has --calibration, --windows and --device.")
            if self.without_text and (mixing or len(given) > 1):
                raise usage_error(max(given), "without a text there is nothing to run", "Leave it out.")
            if not self.without_text and NO_TEXT in (self.calibration or ()):
                raise usage_error("--calibration none", "other texts are given besides", "Leave one of them out.")
            return
        if format not in calibrated and given:
            why = f"{format} is made without a text, the same on every machine"
            option = next(iter(given))
            owners = {"--bits": ("vq2", "bcq"), "--layers": ("vq2",)}.get(option, calibrated)
            owners += prepare.WEIGHED if option in _OF_TEXT else ()
            raise usage_error(option, why, f"It is an option of --format {', '.join(owners)}.")
        decided = given.keys() - {"--layers", *(_OF_TRAINING if self.best else ())}
        if self.layers is not None and (decided or format != "vq2"):
            why = f"the layers are made already, so {min(decided, default='the format')} is decided"
            step = f"It goes with --format vq2 alone, or, to train them further, with {', '.join(_OF_TRAINING)}."
            raise usage_error(f"--layers {self.layers}", why, step)
        if self.bits is not None and format != "vq2":
            raise usage_error("--bits", f"{format} has bits of its own", "It is an option of --format vq2 and bcq.")
        if NO_TEXT in (self.calibration or ()) and not NO_TEXT.exists():
            why = f"{format} is fitted to what the model does on a text"
            raise usage_error("--calibration none", why, "Name a file, or leave it out for the text that localq has.")
        if self.bits is not None and self._number not in SCHEMES and not self.mixed:
            ways = f"There are {', '.join(SCHEMES)}, and mixtures of them: a number in between, as 2.3 or 2.25."
            raise usage_error("--bits", f"{self.bits!r} is not offered", ways)

    @property
    def texts(self) -> tuple[Path, ...]:
        """What to calibrate on."""
        from localq.quantize import calibration  # start-up cost

        return self.calibration or (calibration.DEFAULT,)

    @property
    def without_text(self) -> bool:
        """Was it said that there shall be none? Only `prepare.WEIGHED` take that."""
        return self.calibration == (NO_TEXT,)

    @property
    def is_bare(self) -> bool:
        """Was nothing said of the text?"""
        return self.calibration is None and self.windows is None

    @property
    def mixed(self) -> float | None:
        """Bits per weight where schemes are mixed."""
        number = self._number
        return float(number) if re.fullmatch(r"[23]\.\d{1,2}", number) and number not in SCHEMES else None

    @property
    def scheme(self) -> str:
        """Where it is the same everywhere; of a mixture the least."""
        return SCHEMES.get(self._number or "2", SCHEMES["2"])

    @property
    def _number(self) -> str:
        """The bits without zeros behind: 2.50 is 2.5, and 3.0 is 3."""
        return re.sub(r"(\.\d*?)0+$", r"\1", self.bits or "").removesuffix(".")


def wants_best(best: bool, quick: bool) -> bool | None:
    """Of `--best` and `--quick`; None where neither was given. Raises LocalqError (exit 2) for both."""
    if best and quick:
        raise usage_error("--best", "--quick was given too", "Give one of them.")
    return best if best or quick else None


def together(windows: int, *, best: bool) -> Tuning:
    """How all layers are trained at the end: on every window as often."""
    from localq.quantize.settings import Tuning  # torch loads only now

    steps = -(-windows * WHOLE_PASSES // WHOLE_SEQUENCES)
    return Tuning(steps, WHOLE_SEQUENCES, *WHOLE_RATES) if best else Tuning()


def effort(*, best: bool) -> tuple[Effort, Tuning]:
    """Of `--best` and `--quick`."""
    from localq.quantize.settings import (
        Effort,  # torch loads only now
        Tuning,
    )

    return (
        (Effort(beam=BEST_BEAM, rounds=BEST_ROUNDS), Tuning(BEST_STEPS, BEST_SEQUENCES))
        if best
        else (Effort(), Tuning())
    )
