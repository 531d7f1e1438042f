"""`localq bench --kernels`: each kernel on random weights of real shapes, against fp64, the roof and its rivals.

Correctness first: a row is timed after its result was held against the reference. Times are of a cold L2 cache inside a
CUDA graph (`roofline.time_cold`), bytes are those that the operation must move (`kernels.ops`), the roof is the read
bandwidth measured in the same run. Beside them: F.linear with the dequantized weights in the same type, and
bitsandbytes where it is installed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

import torch
from torch import Tensor
from torch.nn import functional as F

import localq
from localq import kernels
from localq.bench import roofline
from localq.bench.nf4_weights import Weights
from localq.bench.roofline import Timing
from localq.errors import ExitCode, LocalqError
from localq.kernels import ops
from localq.quant import nf4

SEED = 20
# [out, in]: SmolLM2's gate, then the linears of 8B and 70B llamas, the last one with gate and up fused.
SHAPES = ((1536, 576), (4096, 4096), (8192, 8192), (10240, 8192), (28672, 8192), (8192, 28672), (57344, 8192))
GEMV_CASES = ((1, torch.float16), (8, torch.float16), (1, torch.bfloat16))  # rows of x, type of x
CHUNK = 4096  # outputs that are compared in fp64 at a time
HEADER = ("op", "out x in", "rows", "type", "us", "low-high", "GB/s", "roof", "F.linear", "x", "bnb", "x")
FORMAT = "{:<14} {:>13} {:>4} {:>8} {:>8} {:>15} {:>6} {:>5} {:>8} {:>6} {:>8} {:>6}"


@dataclass(frozen=True)
class Row:
    """One measured operation; `linear` and `bitsandbytes` are its rivals' times, None where there is none."""

    op: str
    shape: tuple[int, int]
    rows: int  # of x; 0 where there is no x
    dtype: torch.dtype
    bytes: int
    timing: Timing
    linear: Timing | None
    bitsandbytes: Timing | None

    @property
    def bytes_per_s(self) -> float:
        """Bytes that must move over the median time."""
        return self.bytes / self.timing.median_us * 1e6

    @property
    def type_name(self) -> str:
        """Without "torch."."""
        return str(self.dtype).removeprefix("torch.")


def run(out: TextIO, shapes: Sequence[tuple[int, int]] = SHAPES, replays: int = 30) -> dict[str, Any]:
    """Measure all kernels, write a table to `out`, end with one line of JSON; returns what that line says.

    Raises LocalqError (exit 7) without a GPU or kernels, (exit 1) where a kernel gives a wrong result.
    """
    device = _device()
    roof = roofline.read_bytes_per_s(device)
    conditions = {**_conditions(device, replays), "roof_bytes_per_s": round(roof)}
    print(", ".join(f"{key} {value}" for key, value in conditions.items()), file=out)
    print(FORMAT.format(*HEADER), file=out, flush=True)
    rows = []
    for shape in shapes:
        free = torch.cuda.mem_get_info(device)[0]
        if (needed := needed_bytes(shape, _cache_bytes(device))) > free:
            print(f"{shape[0]} x {shape[1]}: left out, needs {needed:,} bytes and {free:,} are free", file=out)
            continue
        for row in _measure(shape, device, replays):
            rows.append(row)
            print(line(row, roof), file=out, flush=True)
        torch.cuda.empty_cache()
    result = {**conditions, "rows": [as_json(row, roof) for row in rows]}
    print(json.dumps(result), file=out, flush=True)
    return result


def line(row: Row, roof: float) -> str:
    """One line of the table; the columns are those of `HEADER`."""
    spread = f"{row.timing.low_us:.1f}-{row.timing.high_us:.1f}"
    rivals = []
    for rival in (row.linear, row.bitsandbytes):
        if rival is None:
            rivals += ["-", "-"]
        else:
            rivals += [f"{rival.median_us:.1f}", f"{rival.median_us / row.timing.median_us:.2f}"]
    return FORMAT.format(
        row.op, f"{row.shape[0]} x {row.shape[1]}", row.rows or "-", row.type_name, f"{row.timing.median_us:.1f}",
        spread, f"{row.bytes_per_s / 1e9:.0f}", f"{row.bytes_per_s / roof:.0%}", *rivals,
    )  # fmt: skip


def as_json(row: Row, roof: float) -> dict[str, Any]:
    """One row of the last line, units in the key names."""
    return {
        "op": row.op,
        "out": row.shape[0],
        "in": row.shape[1],
        "rows": row.rows,
        "dtype": row.type_name,
        "median_us": round(row.timing.median_us, 2),
        "low_us": round(row.timing.low_us, 2),
        "high_us": round(row.timing.high_us, 2),
        "bytes": row.bytes,
        "bytes_per_s": round(row.bytes_per_s),
        "share_of_roof": round(row.bytes_per_s / roof, 4),
        "linear_us": None if row.linear is None else round(row.linear.median_us, 2),
        "bitsandbytes_us": None if row.bitsandbytes is None else round(row.bitsandbytes.median_us, 2),
    }


def needed_bytes(shape: tuple[int, int], cache_bytes: int) -> int:
    """Device memory that a shape takes at most: 16-bit copies or results, packed copies, the matrix in f32, a chunk."""
    count = shape[0] * shape[1]
    dense, packed = 2 * count, ops.nf4_weight_bytes(count)
    outputs = roofline.copies_for_cold_cache(dense, cache_bytes) * (dense + packed)
    inputs = roofline.copies_for_cold_cache(packed, cache_bytes) * packed
    return max(outputs, inputs) + 2 * dense + 16 * CHUNK * shape[1]


# ---- measuring


def _measure(shape: tuple[int, int], device: torch.device, replays: int) -> Iterator[Row]:
    weights = Weights.random(shape, device, SEED)
    yield _measure_dequantize(weights, torch.float16, replays)
    for rows, dtype in GEMV_CASES:
        yield _measure_gemv(weights, rows, dtype, replays)


def _measure_dequantize(weights: Weights, dtype: torch.dtype, replays: int) -> Row:
    if not torch.equal(weights.dequantize(dtype), nf4.dequantize(weights.packed, dtype)):
        raise _wrong("nf4_dequantize", weights.shape, "differs from the reference")
    moved = ops.nf4_dequantize_bytes(weights.shape, dtype)
    device = weights.packed.codes.device
    copies = weights.copies(roofline.copies_for_cold_cache(moved, _cache_bytes(device)))
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    results = [torch.empty(weights.shape, dtype=dtype, device=device) for _ in copies]
    pairs = list(zip(copies, results, strict=True))
    timing = roofline.time_cold([partial(copy.dequantize, dtype, result) for copy, result in pairs], replays)
    rival = None
    if _has_bitsandbytes():
        from bitsandbytes.functional import dequantize_4bit  # a rival that need not be there

        theirs = [(*copy.for_bitsandbytes(dtype), result) for copy, result in pairs]
        calls = [partial(dequantize_4bit, codes, state, out=result) for codes, state, result in theirs]
        rival = roofline.time_cold(calls, replays)
    return Row("nf4_dequantize", weights.shape, 0, dtype, moved, timing, None, rival)


def _measure_gemv(weights: Weights, rows: int, dtype: torch.dtype, replays: int) -> Row:
    device = weights.packed.codes.device
    generator = torch.Generator(device).manual_seed(SEED + rows)
    x = torch.randn(rows, weights.shape[1], device=device, generator=generator).to(dtype)
    dense = weights.dequantize(dtype)
    _check_gemv(weights, x, dense)
    copies = weights.copies(roofline.copies_for_cold_cache(weights.nbytes, _cache_bytes(device)))
    timing = roofline.time_cold([partial(copy.gemv, x) for copy in copies], replays)
    rival = None
    if _has_bitsandbytes():
        from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # a rival that need not be there

        theirs = [copy.for_bitsandbytes(dtype) for copy in copies]
        rival = roofline.time_cold([partial(matmul_4bit, x, codes, state) for codes, state in theirs], replays)
        del theirs
    del copies
    count = roofline.copies_for_cold_cache(dense.nbytes, _cache_bytes(device))
    matrices = [dense, *(dense.clone() for _ in range(count - 1))]
    linear = roofline.time_cold([partial(F.linear, x, matrix) for matrix in matrices], replays)
    moved = ops.nf4_gemv_bytes(rows, *weights.shape)
    return Row("nf4_gemv", weights.shape, rows, dtype, moved, timing, linear, rival)


def _check_gemv(weights: Weights, x: Tensor, dense: Tensor) -> None:
    """The kernel may be twice as far from fp64 as F.linear with the dequantized weights is."""
    chunks = torch.split(weights.dequantize(torch.float32), CHUNK)
    exact = torch.cat([x.double() @ chunk.double().T for chunk in chunks], dim=1)
    error = (weights.gemv(x).double() - exact).abs().max().item()
    naive = (F.linear(x, dense).double() - exact).abs().max().item()
    if not error <= 2 * naive + 1e-6 * exact.abs().max().item():
        raise _wrong("nf4_gemv", weights.shape, f"is off by {error:.3g}, F.linear by {naive:.3g}")


def _wrong(op: str, shape: tuple[int, int], why: str) -> LocalqError:
    return LocalqError(op, f"the result on {shape[0]} x {shape[1]} {why}", "Report this as a bug; nothing was timed.")


# ---- conditions


def _device() -> torch.device:
    step = "`localq doctor` says what is missing."
    if not torch.cuda.is_available():
        raise LocalqError("bench --kernels", "torch can use no GPU here", step, ExitCode.NO_DEVICE)
    if why := kernels.why_not():
        raise LocalqError("bench --kernels", why, step, ExitCode.NO_DEVICE)
    return torch.device("cuda", torch.cuda.current_device())


def _conditions(device: torch.device, replays: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    build = kernels.build_info()
    return {
        "gpu": properties.name,
        "sm": f"{properties.major}{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": _cache_bytes(device),
        **_driver(properties),
        "localq": localq.__version__,
        "kernels_cuda": build.cuda_version if build else None,
        "torch": torch.__version__,
        "bitsandbytes": importlib.metadata.version("bitsandbytes") if _has_bitsandbytes() else None,
        "seed": SEED,
        "replays": replays,
    }


def _driver(properties: Any) -> dict[str, Any]:
    """Driver version and clocks at the start, as far as NVML tells."""
    import pynvml  # type: ignore[import-untyped]  # only benchmarks ask for clocks

    try:
        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
        sm_clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        memory_clock = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return {"driver": f"not told ({error})", "max_sm_clock_mhz": None, "max_memory_clock_mhz": None}
    return {"driver": version, "max_sm_clock_mhz": sm_clock, "max_memory_clock_mhz": memory_clock}


def _cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _has_bitsandbytes() -> bool:
    return importlib.util.find_spec("bitsandbytes") is not None
