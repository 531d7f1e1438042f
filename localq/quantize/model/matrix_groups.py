"""Groups of a layer: matrices that read the same input are quantized together, in computing order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from localq.models.attention import Attention, Pass
from localq.models.decoder import Block
from localq.models.layers import PlainLinear, RecurrentMixer
from localq.models.unstacked_experts import UnstackedSharedMixture
from localq.quantize.model import calibration_stream, expert_tokens
from localq.quantize.model.fold import minus_signs
from localq.quantize.settings import ConversionSettings

OUT, FIRST_OF_MLP, DOWN = 1, 2, 3  # numbers of groups


@dataclass(frozen=True)
class Group:
    """Matrices that read one input.

    names     of their modules in the block
    x         computes their input, from the block and the stream before attention or before the MLP
    home      the module of the block that holds shared codebooks, "" for a single matrix
    writes    the output is added to the stream, so it compensates for the drift
    number    in the layer; in a mixture the same for all experts
    after     linears that compute x
    expert    number of the expert, or None
    """

    names: tuple[str, ...]
    x: Callable[[Block, Tensor, Pass], Tensor]
    home: str
    writes: bool
    number: int
    after: tuple[str, ...] = ()
    expert: int | None = None

    def is_rotated(self, rotate: str) -> bool:
        """True where the input is rotated at run time; that of o is rotated with the values, if at all."""
        return {"none": False, "down": self.number == DOWN, "all": self.number != OUT}[rotate]

    def homes(self, shares: bool) -> dict[str, str]:
        """Return matrix -> the module that holds its codebooks."""
        return {name: (self.home if shares else "") or name for name in self.names}

    def signs(self, columns: int, layer: int, settings: ConversionSettings) -> Tensor | None:
        """Return the signs of the run-time rotation of the input, u8 [columns / 8]; None without one."""
        if not self.is_rotated(settings.rotate):
            return None
        return minus_signs(columns, (settings.seed * 4096 + layer) * 4 + self.number)


def groups_of(block: Block) -> list[Group]:
    """Return the groups of a block: two of what mixes tokens, and two of the MLP or of every expert."""
    names = {id(module): name for name, module in block.named_modules()}
    mixer, norms = block.mixer(), block.norms()
    assert isinstance(mixer, Attention | RecurrentMixer)
    home = names[id(mixer)]
    attention = tuple(names[id(module)] for module in mixer.inputs() if not isinstance(module, PlainLinear))
    out = (f"{home}.{mixer.output}",)
    of_attention = [
        Group(attention, lambda b, x, step: calibration_stream.attention_input(b, x), home, False, 0),
        Group(out, calibration_stream.output_projection_input, "", norms.after_attention is None, OUT, attention),
    ]
    if (mixture := expert_tokens.mixture_of(block)) is not None:
        of_experts = [group for number in range(len(mixture.experts)) for group in _of_expert(number)]
        return of_attention + of_experts + (_of_shared() if isinstance(mixture, UnstackedSharedMixture) else [])
    mlp = tuple(names[id(module)] for module in block.mlp.inputs())
    return [
        *of_attention,
        Group(mlp, lambda b, x, step: calibration_stream.mlp_input(b, x), "mlp", False, 2),
        Group(
            ("mlp.down_proj",),
            lambda b, x, step: calibration_stream.down_projection_input(b, x),
            "",
            norms.after_mlp is None,
            DOWN,
            mlp,
        ),
    ]


def _of_shared() -> list[Group]:
    """Return the two groups of a shared expert, which compensates for no drift, as other experts do not."""
    home = "mlp.shared_expert"
    inputs = (f"{home}.gate_proj", f"{home}.up_proj")
    return [
        Group(inputs, lambda b, x, step: calibration_stream.mlp_input(b, x), home, False, FIRST_OF_MLP),
        Group(
            (f"{home}.down_proj",),
            lambda b, x, step: calibration_stream.shared_projection_input(b, x),
            "",
            False,
            DOWN,
            inputs,
        ),
    ]


def _of_expert(number: int) -> list[Group]:
    """Return the two groups of an expert; `expert_tokens.gather` computes their inputs."""
    home = f"mlp.experts.{number}"
    inputs = (f"{home}.gate_proj", f"{home}.up_proj")

    def opened(block: Block, x: Tensor, step: Pass) -> Tensor:
        return calibration_stream.mlp_input(block, x)

    return [
        Group(inputs, opened, home, False, FIRST_OF_MLP, expert=number),
        Group((f"{home}.down_proj",), opened, "", False, DOWN, inputs, number),
    ]
