"""Options of `localq quantize` for formats that need calibration: bits, text, effort. Loads no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq.cli import help_page, option_values
from localq.errors import usage_error
from localq.files.schemes import VQ2_SCHEMES

if TYPE_CHECKING:
    from localq.quantize.settings import Effort, Tuning

QUICK_WINDOWS = 64
WEIGHED_WINDOWS = 16  # of formats that a text weighs: moments of inputs need fewer
NO_TEXT = Path("none")
_OF_TEXT = ("--calibration", "--windows", "--device")
_OF_TRAINING = ("--best", *_OF_TEXT, "--vram")  # of existing layers
BEST_BEAM, BEST_ROUNDS = 64, 2
BEST_STEPS, BEST_SEQUENCES = 200, 4  # of fine-tuning
WHOLE_PASSES, WHOLE_SEQUENCES = 2, 2  # of training all layers
WHOLE_RATES = (1e-3, 5e-4, 5e-4)  # of its codebooks, scales, norms
LARGEST_ROTATION_SEED = 2**31 - 1

_BITS = "Bits per weight: 2-4 (vq2) or 1-5 (bcq), e.g. 2.3."
Bits = Annotated[str | None, typer.Option("--bits", metavar="BITS", help=_BITS, rich_help_panel=help_page.QUALITY)]
_BEST = "Improve quality: search wider, train longer."
Best = Annotated[bool, typer.Option("--best", help=_BEST, rich_help_panel=help_page.QUALITY)]
Quick = Annotated[
    bool, typer.Option("--quick", help="Quantize without --best (default).", rich_help_panel=help_page.QUALITY)
]
_TEXT = "Calibration text or .jsonl chats; do not use your evaluation text. Repeatable; none = no calibration."
Calibration = Annotated[
    list[Path] | None,
    typer.Option("--calibration", metavar="FILE", help=_TEXT, rich_help_panel=help_page.QUALITY),
]
Windows = Annotated[
    int | None,
    typer.Option(
        "--windows", min=1, max=option_values.MOST_WINDOWS, help="Number of 2048-token calibration windows.",
        rich_help_panel=help_page.QUALITY,
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, max=LARGEST_ROTATION_SEED, help="Seed for the random rotations (vq2, aqlm2x8).",
        rich_help_panel=help_page.ADVANCED,
    ),
]  # fmt: skip
_LAYERS = "Reuse layers already quantized from SOURCE (vq2)."
Layers = Annotated[
    Path | None,
    typer.Option("--layers", metavar="FOLDER", help=_LAYERS, rich_help_panel=help_page.ADVANCED),
]


@dataclass(frozen=True)
class CalibrationOptions:
    """The calibration options given on the command line; None where one is absent."""

    bits: str | None
    calibration: tuple[Path, ...] | None
    windows: int | None
    best: bool | None
    device: str | None
    seed: int | None
    vram: str | None
    layers: Path | None = None

    def check(self, format: str, mixing: bool = False) -> None:
        """Raises LocalqError (exit 2) for options that `format` does not have, and for unsupported bits."""
        given = {f"--{name}": value for name, value in vars(self).items() if value is not None}
        if "--best" in given and not self.best:
            given = {"--quick" if name == "--best" else name: value for name, value in given.items()}
        from localq.files import format_facts  # start-up cost

        formats = format_facts.writable()
        if formats[format].weighs_text:
            if other := given.keys() - set(_OF_TEXT):
                why = f"--format {format} does not support this option"
                raise usage_error(min(other), why, "Its calibration options are --calibration, --windows and --device.")
            if self.without_text and (mixing or len(given) > 1):
                raise usage_error(max(given), "has no effect without a calibration text", "Remove the option.")
            if not self.without_text and NO_TEXT in (self.calibration or ()):
                raise usage_error(
                    "--calibration none", "cannot be combined with a calibration text", "Remove one of them."
                )
            return
        if formats[format].made_from != "text" and given:
            why = f"--format {format} needs no calibration"
            option = next(iter(given))
            calibrated = tuple(name for name, each in formats.items() if each.made_from == "text")
            owners = {"--bits": ("vq2", "bcq"), "--layers": ("vq2",)}.get(option, calibrated)
            if option in _OF_TEXT:
                owners += tuple(name for name, each in formats.items() if each.weighs_text)
            raise usage_error(option, why, f"Formats with this option: {', '.join(owners)}.")
        decided = given.keys() - {"--layers", *(_OF_TRAINING if self.best else ())}
        if self.layers is not None and (decided or format != "vq2"):
            why = f"{min(decided, default='the format')} is fixed by the existing layers"
            step = "--layers can be combined only with --format vq2 and --best, which trains the layers further."
            raise usage_error(f"--layers {self.layers}", why, step)
        if self.bits is not None and format != "vq2":
            raise usage_error(
                "--bits", f"--format {format} has a fixed bit width", "Use --bits only with --format vq2 or bcq."
            )
        if NO_TEXT in (self.calibration or ()) and not NO_TEXT.exists():
            why = f"--format {format} needs a calibration text"
            raise usage_error("--calibration none", why, "Pass a file, or remove the option to use localq's own text.")
        if self.bits is not None and self._number not in VQ2_SCHEMES and not self.mixture_bits:
            ways = f"Use {', '.join(VQ2_SCHEMES)}, or a mixture in between, such as 2.3 or 2.25."
            raise usage_error("--bits", f"{self.bits!r} is not supported", ways)

    @property
    def texts(self) -> tuple[Path, ...]:
        """The texts to calibrate on."""
        from localq.quantize import calibration  # start-up cost

        return self.calibration or (calibration.DEFAULT,)

    @property
    def without_text(self) -> bool:
        """True for `--calibration none`, which only formats accept that are made without a text too."""
        return self.calibration == (NO_TEXT,)

    @property
    def is_bare(self) -> bool:
        """True if no calibration option is given."""
        return self.calibration is None and self.windows is None

    @property
    def mixture_bits(self) -> float | None:
        """Bits per weight of a mixture of schemes; None without one."""
        number = self._number
        return float(number) if re.fullmatch(r"[23]\.\d{1,2}", number) and number not in VQ2_SCHEMES else None

    @property
    def scheme(self) -> str:
        """The scheme of all layers; of a mixture the smallest."""
        return VQ2_SCHEMES.get(self._number or "2", VQ2_SCHEMES["2"])

    @property
    def _number(self) -> str:
        """The bits without trailing zeros: 2.50 is 2.5, and 3.0 is 3."""
        return re.sub(r"(\.\d*?)0+$", r"\1", self.bits or "").removesuffix(".")


def wants_best(best: bool, quick: bool) -> bool | None:
    """Return whether --best applies; None without it and --quick. Raises LocalqError (exit 2) for both."""
    if best and quick:
        raise usage_error("--best", "cannot be combined with --quick", "Use one or the other.")
    return best if best or quick else None


def joint_training(windows: int, *, best: bool) -> Tuning:
    """Settings of the joint training of all layers: every window as often."""
    from localq.quantize.settings import Tuning  # torch loads only now

    steps = -(-windows * WHOLE_PASSES // WHOLE_SEQUENCES)
    return Tuning(steps, WHOLE_SEQUENCES, *WHOLE_RATES) if best else Tuning()


def effort(*, best: bool) -> tuple[Effort, Tuning]:
    """Search and fine-tuning settings of --best or --quick."""
    from localq.quantize.settings import (
        Effort,  # torch loads only now
        Tuning,
    )

    return (
        (Effort(beam=BEST_BEAM, rounds=BEST_ROUNDS), Tuning(BEST_STEPS, BEST_SEQUENCES))
        if best
        else (Effort(), Tuning())
    )
