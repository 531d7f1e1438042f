"""Facts of each format without its code: one record per format, in display order. Torch-free.

A new format is a record in `_RECORDS` and a module in `localq.formats.FORMATS`. Catalogue, planner, `localq quantize`
and benchmarks read these records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localq.errors import usage_error
from localq.files import compressed_tensors, format_sizes, schemes
from localq.files.architecture import Architecture
from localq.files.gguf.block_types import FAST_TYPES
from localq.files.linears import Linears
from localq.files.schemes import Shapes

MIB = 2**20


def _no_scheme(quantization: Mapping[str, Any]) -> str:
    return ""


def _no_key(scheme: str) -> str | None:
    return None


def _no_gather_bytes(rows: int, columns: int, scheme: str) -> int:
    return 0


@dataclass(frozen=True)
class Format:
    """A format of weights.

    name            in NAME@FORMAT, `--format` and models.toml
    matrix_bytes    (linear, scheme) -> bytes of one matrix in files; raises LocalqError for another format's scheme
    quant_method    its name in config.json; "" for weights in 16 bit
    full_precision  other formats are quantized from it

    Schemes ("" for formats without):
    scheme_of_tensors   (shapes of all tensors, config.json) -> the scheme; None if config.json states it
    scheme_of_config    (quantization_config) -> the scheme
    unreadable          (quantization_config) -> the variant that localq does not read, in a few words
    random_scheme       scheme of random weights

    Memory on a GPU:
    expert_bytes        (linear, scheme) -> bytes of an expert matrix in memory, if they differ from those in files
    tables              (linears, scheme) -> bytes in addition to the weights: operands, padding
    workspace           scheme -> bytes in which blocks of a product hand each other sums; formats share them
    has_codebooks       its tables depend on the scheme, which only its tensors show
    unpack_bytes        temporaries when torch dequantizes (`CHUNK_WEIGHTS` of its module)
    unpacks_16_bit      16-bit models need these temporaries too; else kernels write the result directly
    copies_inputs       prefill holds a second copy of a Linear's input, rotated or in the order of its groups

    Experts of a mixture:
    experts             "together": a decode step runs them with the router on the device; "untimed": the same, with
                        kernels that were not measured on a GPU; "one by one": the host waits for every layer
    stacks_experts      experts are the rows of one matrix; gate and up of an expert are one product
    experts_only        only experts of a mixture are in this format, the other matrices in 16 bit
    keeps_experts       experts that are published in their own format stay in it

    How `localq quantize` makes it:
    made_from           "tensors": matrix by matrix; "text": layer by layer on a text, by a compiled search; "": not
    weighs_text         matrix by matrix, optionally with weights of columns or errors from a text
    made_by_name        NAME@FORMAT quantizes it if it is not published
    made_of_mixtures    NAME@FORMAT also quantizes mixtures of experts
    quantize_name       its name in `quantize --format`, if it differs from `name`
    temporaries         bytes per weight while a matrix is quantized by itself, beside the matrix and its result
    parameters_per_s    speed of quantizing matrix by matrix, for estimates; of one core if `per_core`

    Choice and speed:
    offered_last        why it is offered after all others; "" if it is not
    speed_key           scheme -> its launches in data/measurements.toml; None if none were measured
    gathered_bytes      (rows, columns, scheme) -> bytes of the L2 sectors that a product gathers; 0 if it streams
    rotates_inputs, own_codebooks   a step takes time for rotations, or for tables of every matrix
    """

    name: str
    matrix_bytes: Callable[[Linears, str], int]
    quant_method: str = ""
    full_precision: bool = False

    scheme_of_tensors: Callable[[Shapes, dict[str, Any]], str] | None = None
    scheme_of_config: Callable[[Mapping[str, Any]], str] = _no_scheme
    unreadable: Callable[[Mapping[str, Any]], str] = _no_scheme
    random_scheme: str = ""

    expert_bytes: Callable[[Linears, str], int] | None = None
    tables: Callable[[Sequence[Linears], str], int] = format_sizes.no_tables
    workspace: Callable[[str], int] = format_sizes.no_workspace
    has_codebooks: bool = False
    unpack_bytes: int = 0
    unpacks_16_bit: bool = True
    copies_inputs: bool = False

    experts: Literal["together", "untimed", "one by one"] = "one by one"
    stacks_experts: bool = False
    experts_only: bool = False
    keeps_experts: bool = False

    made_from: Literal["", "tensors", "text"] = ""
    weighs_text: bool = False
    made_by_name: bool = False
    made_of_mixtures: bool = True
    quantize_name: str = ""
    temporaries: int = 4  # a copy in float32
    parameters_per_s: float = 35e6  # `localq quantize smollm2-135m` in NF4 on two CPU cores: 134.5 M in 3.8 s
    per_core: bool = False

    offered_last: str = ""
    speed_key: Callable[[str], str | None] = _no_key
    gathered_bytes: Callable[[int, int, str], int] = _no_gather_bytes
    rotates_inputs: bool = False
    own_codebooks: bool = False

    @property
    def is_quantized(self) -> bool:
        """True if the weights are quantized, and stay so on a GPU."""
        return bool(self.quant_method)

    def placed_bytes(self, linear: Linears, scheme: str = "") -> int:
        """Bytes of one matrix in memory, without `tables`."""
        in_memory = self.expert_bytes if linear.expert and self.expert_bytes is not None else self.matrix_bytes
        return in_memory(linear, scheme)


def _key(name: str) -> Callable[[str], str | None]:
    """A `speed_key` that is the same for all schemes."""
    return lambda scheme: name


def _aqlm_key(scheme: str) -> str:
    books, bits, _ = schemes.aqlm_scheme(scheme)
    return "1x16" if bits > 8 else "2x8" if books > 1 else "vq2"


def _vptq_key(scheme: str) -> str:
    return "vptq + 256" if schemes.vptq_scheme(scheme)[2] else "vptq"


def _int4_key(scheme: str) -> str | None:
    return None if scheme == "g16" else "int4"  # groups of 16 have no kernel


def without_kernels(scheme: str) -> str:
    """The types of GGUF blocks in `scheme` that no kernel reads, such as "Q1_0"; empty for none."""
    mixture, _, slow = scheme.partition(", ")
    return slow if mixture.startswith(schemes.MIX) else "" if scheme in FAST_TYPES else scheme


def _gguf_key(scheme: str) -> str | None:
    return None if without_kernels(scheme) else "int4"  # not measured: the kernels that are built alike


_PLAIN: dict[str, Any] = {"matrix_bytes": format_sizes.plain, "speed_key": _key("16 bit")}
_INT4: dict[str, Any] = {
    "scheme_of_config": schemes.int4_of_config,
    "unreadable": schemes.int4_unreadable,
    "unpack_bytes": 64 * MIB,
    "speed_key": _int4_key,
}
_GATHERS = "slow: random access to its codebook"  # from L2, mostly 16 times the bytes of the codes

_RECORDS = (
    Format("bf16", full_precision=True, experts="together", **_PLAIN),
    Format("fp16", full_precision=True, experts="together", **_PLAIN),
    Format(
        "nf4",
        format_sizes.nf4,
        "bitsandbytes",
        expert_bytes=format_sizes.nf4_expert,
        workspace=format_sizes.workspace,
        experts="together",
        stacks_experts=True,
        keeps_experts=True,
        made_from="tensors",
        temporaries=1,
        made_by_name=True,
        speed_key=_key("nf4"),
    ),
    Format(
        "vq2",
        format_sizes.vq2,
        "localq_vq2",
        scheme_of_tensors=schemes.vq2_of_tensors,
        random_scheme="s4l16",
        tables=format_sizes.vq2_tables,
        workspace=format_sizes.workspace,
        has_codebooks=True,
        unpack_bytes=64 * MIB,
        unpacks_16_bit=False,  # kernels read codes in tiles, and rotate
        copies_inputs=True,
        experts="together",
        made_from="text",
        made_by_name=True,
        speed_key=_key("vq2"),
        rotates_inputs=True,
    ),
    Format(
        "aqlm",
        format_sizes.aqlm,
        "aqlm",
        scheme_of_tensors=schemes.aqlm_of_tensors,
        random_scheme="2x8g8",
        tables=format_sizes.aqlm_tables,
        workspace=format_sizes.aqlm_workspace,
        has_codebooks=True,
        unpack_bytes=48 * MIB,
        experts="together",  # also for 1x16, whose experts are gathered one by one: a name does not state the scheme
        made_from="text",
        quantize_name="aqlm2x8",
        offered_last=_GATHERS,
        speed_key=_aqlm_key,
        gathered_bytes=format_sizes.aqlm_gather_bytes,
        own_codebooks=True,
    ),
    Format(
        "vptq",
        format_sizes.vptq,
        "vptq",
        scheme_of_config=schemes.vptq_of_config,
        random_scheme="v8-k65536-256",
        unpack_bytes=32 * MIB,
        offered_last=_GATHERS,
        speed_key=_vptq_key,
        gathered_bytes=format_sizes.vptq_gather_bytes,
    ),
    Format(
        "mxfp4",
        format_sizes.mxfp4,
        "mxfp4",
        experts="together",
        stacks_experts=True,
        experts_only=True,
        made_from="tensors",
        temporaries=1,
        speed_key=_key("mxfp4"),
    ),
    Format(
        "bcq",
        format_sizes.bcq,
        "localq_bcq",
        scheme_of_tensors=schemes.bcq_of_tensors,
        random_scheme="q3g128",
        tables=format_sizes.bcq_tables,
        unpack_bytes=64 * MIB,
        unpacks_16_bit=False,
        made_from="tensors",
        temporaries=9,
        weighs_text=True,
        made_by_name=True,
        made_of_mixtures=False,
        parameters_per_s=5e4,  # 3 planes, 32,768 tokens: from the count of operations, not timed
        per_core=True,
        offered_last="3-bit quality not measured on a complete model",
        speed_key=_key("bcq"),
    ),
    Format(
        "squeezellm",
        format_sizes.squeezellm,
        "squeezellm",
        made_from="tensors",
        temporaries=3,
        weighs_text=True,
        made_by_name=True,
        parameters_per_s=5e5,  # one core of a busy machine, without a text: 1.3 ms per row of 576 to 1,536 columns
        per_core=True,
        offered_last="slower than nf4",
        speed_key=_key("squeezellm"),
    ),
    Format("awq", format_sizes.awq, "awq", **_INT4),
    Format("gptq", format_sizes.gptq, "gptq", copies_inputs=True, **_INT4),
    Format(
        compressed_tensors.METHOD,
        format_sizes.awq,
        compressed_tensors.METHOD,
        scheme_of_config=compressed_tensors.scheme_of_config,
        unreadable=compressed_tensors.unreadable,
        unpack_bytes=64 * MIB,
        copies_inputs=True,
        speed_key=_int4_key,
    ),
    Format("nvfp4", format_sizes.nvfp4, "nvfp4", unpack_bytes=64 * MIB, speed_key=_key("int4")),  # as for GGUF
    Format("fp8", format_sizes.fp8, "fp8", unpack_bytes=64 * MIB, speed_key=_key("8 bit")),
    Format(
        "gguf",
        format_sizes.gguf,
        "gguf",
        tables=format_sizes.gguf_tables,
        random_scheme="Q4_K",
        unpack_bytes=64 * MIB,
        speed_key=_gguf_key,
        experts="untimed",
    ),
)
FORMATS: dict[str, Format] = {each.name: each for each in _RECORDS}


def of(name: str) -> Format:
    """The format `name`. Raises LocalqError (exit 2) for an unknown one."""
    if name not in FORMATS:
        raise usage_error(name[:40], "unknown format", f"Formats: {', '.join(FORMATS)}.")
    return FORMATS[name]


def of_method(quant_method: object) -> Format | None:
    """The format with this `quant_method` in config.json; None for an unknown one."""
    return next((each for each in FORMATS.values() if each.is_quantized and each.quant_method == quant_method), None)


def matrix_bytes(linear: Linears, format: str, scheme: str = "") -> int:
    """Bytes of the tensors of one [rows, columns] matrix in `format`, without padding."""
    return of(format).matrix_bytes(linear, scheme)


def writable() -> dict[str, Format]:
    """The formats that `localq quantize` makes, by their name in its `--format`."""
    return {each.quantize_name or each.name: each for each in FORMATS.values() if each.made_from}


def formats_by_tensor() -> tuple[str, ...]:
    """The formats that `localq quantize` makes matrix by matrix."""
    return tuple(name for name, each in FORMATS.items() if each.made_from == "tensors")


def full_precision() -> tuple[str, ...]:
    """The formats that other formats are quantized from."""
    return tuple(name for name, each in FORMATS.items() if each.full_precision)


def of_experts(arch: Architecture, format: str) -> Format:
    """The format of the experts of a model in `format`, which may keep their published format."""
    own = of(format)
    return of(arch.traits.published_experts) if own.keeps_experts and arch.traits.published_experts else own


def outside_experts(arch: Architecture, format: str) -> Format:
    """The format of all other matrices of a model in `format`."""
    own = of(format)
    return of("bf16") if own.experts_only and arch.experts else own


def of_linear(arch: Architecture, linear: Linears, format: str) -> Format:
    """The format of `linear` in a model in `format`."""
    return of_experts(arch, format) if linear.expert else outside_experts(arch, format)


def stacks_shared(arch: Architecture, format: str) -> bool:
    """Return whether a GPU holds shared experts behind the routed ones: one width, in 16 bit or one stacked format.

    Files may leave a shared expert in 16 bit beside experts in NF4, which only their tensors show.
    """
    own = of_experts(arch, format)
    alike = arch.shared_intermediate == arch.expert_intermediate and own.name == outside_experts(arch, format).name
    may = bool(arch.experts and arch.shared_intermediate) and arch.traits.hybrid  # the others add what it gives
    return may and alike and (own.stacks_experts or not own.is_quantized)


def _no_calibration(arch: Architecture) -> bool:
    """Return whether the model rules out calibration: a text cannot pass through one layer at a time."""
    beside = arch.experts and arch.traits.two_head_sizes
    other_parts = arch.traits.mamba or arch.traits.one_part or arch.traits.head_gates or arch.traits.parallel
    return bool(arch.shared_layers or arch.input_width or beside or other_parts or arch.kv_latent)


def why_unsupported(arch: Architecture, format: str) -> str | None:
    """Return why localq does not run models of this shape in `format`, in a few words; None if it does."""
    own = of(format)
    if own.made_from == "text" and _no_calibration(arch):
        return NO_CALIBRATION
    reads = own.full_precision or own.experts_only or own.keeps_experts or own.name == "gguf"
    if arch.traits.interleaved_experts and not reads:
        if own.made_from == "text":
            return f"{NO_SEARCH_OF_EXPERTS} ({format})"
        return f"{arch.model_type.replace('_', '-')} experts are supported only in 16-bit and MXFP4, not in {format}"
    return None


NO_CALIBRATION = (
    "models with a shared KV cache, per-layer inputs, experts alongside an MLP, Mamba-2 layers, per-head gates, "
    "parallel blocks or latent attention cannot be quantized with calibration"
)
NO_SEARCH_OF_EXPERTS = "2-bit formats do not support the biases and interleaved gate/up rows of this model's experts"
NO_WEIGHING_OF_EXPERTS = "calibration is not supported for MoE experts"


def one_by_one(arch: Architecture, format: str) -> bool:
    """Return whether a GPU decodes experts in `format` one by one, which is slow."""
    return bool(arch.experts) and of(format).experts == "one by one"


def experts_come_last(arch: Architecture, format: str) -> bool:
    """Return whether a mixture in `format` is offered last, because its experts are slow or of unknown speed."""
    return bool(arch.experts) and of(format).experts != "together"
