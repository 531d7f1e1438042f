"""The kernels of experts and of MXFP4 behind their wrappers, compiled for the CPU."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

from localq import kernels
from localq.formats.experts import grouped
from localq.formats.experts import kernel as experts
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from tests.support.kernels.cuda_headers import compile_on_cpu

KERNELS = ["experts/gemv.cu", "experts/router.cu", "experts/mxfp4_gemv.cu", "experts/mxfp4_dequantize.cu",
           "experts/gemm.cu", "experts/entries.cu"]  # fmt: skip
# Multiprocessors, and shared memory of a block: room for all tiles; for one or two with the rest in later waves.
ROOMY, NARROW = (3, 232_448), (2, 1_600)
POINTER, LONG, FLOAT, INT, BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_bool


def fields_of(**kinds):
    return type("Fields", (ctypes.Structure,), {"_fields_": list(kinds.items())})


STACK = fields_of(
    format=INT, codes=POINTER, scales=POINTER, nested_absmax=POINTER, nested_map=POINTER, offset=FLOAT,
    code_map=POINTER, experts=LONG, out=LONG, in_features=LONG,
)  # fmt: skip
STRUCTS = {  # csrc/experts/experts.h
    "router": fields_of(
        x=POINTER, weight=POINTER, bias=POINTER, norm=INT, norm_weight=POINTER, eps=FLOAT, in_features=LONG,
        experts=LONG, active=INT, how=INT, workspace=POINTER, weights=POINTER, chosen=POINTER,
        shared_gate=POINTER,
    ),
    "experts_gate_up": fields_of(
        stack=STACK, x=POINTER, norm=INT, norm_weight=POINTER, eps=FLOAT, bias=POINTER, chosen=POINTER, active=INT,
        gate=INT, alpha=FLOAT, limit=FLOAT, interleaved=BOOL, y=POINTER,
    ),
    "experts_down": fields_of(
        stack=STACK, x=POINTER, bias=POINTER, chosen=POINTER, weights=POINTER, active=INT, residual=POINTER,
        early=BOOL, y=POINTER,
    ),
}  # fmt: skip
STRUCTS |= {  # csrc/experts/grouped.h
    "experts_sort": fields_of(
        chosen=POINTER, count=LONG, active=INT, experts=INT, rows=POINTER, places=POINTER, ends=POINTER,
        tile_ends=POINTER,
    ),
    "experts_gemm": fields_of(
        stack=STACK, first=LONG, x=POINTER, rows=POINTER, ends=POINTER, tile_ends=POINTER, all_experts=LONG,
        entries=LONG, bias=POINTER, gated=BOOL, gate=INT, alpha=FLOAT, limit=FLOAT, interleaved=BOOL, y=POINTER,
    ),
}  # fmt: skip
MATRIX = fields_of(codes=POINTER, scales=POINTER, out=LONG, in_features=LONG)
EXTRAS = fields_of(
    norm=INT, norm_weight=POINTER, eps=FLOAT, residual=POINTER, activation=INT, biases=POINTER * 3, y_is_f32=BOOL
)


def library(folder: Path) -> ctypes.CDLL:
    """All of them; `folder` is an empty one."""
    faults = ("route", *STRUCTS, "experts_sum", "mxfp4_gemv", "mxfp4_dequantize")
    return compile_on_cpu(folder, "experts_on_cpu.cpp", KERNELS, faults=faults)


def install(library: ctypes.CDLL, monkeypatch) -> SimpleNamespace:
    """The wrappers run the kernels of `library` until the test ends.

    device      of the result: multiprocessors and shared memory of what they run on
    conflicts   between banks, since it was last called
    """
    library.conflicts_on_cpu.restype = LONG
    here = SimpleNamespace(device=ROOMY, conflicts=library.conflicts_on_cpu)

    def route(*, logits, experts, active, how, weights, chosen, device, stream):
        given = (POINTER(logits), LONG(experts), active, how, POINTER(weights), POINTER(chosen))
        library.route_on_cpu(*given)

    def router(*, type, device, stream, **given):
        library.router_on_cpu(ctypes.byref(STRUCTS["router"](**given)), type)

    def sort(*, device, stream, **given):
        library.experts_sort_on_cpu(ctypes.byref(STRUCTS["experts_sort"](**given)))

    def sum_(*, x, places, weights, y, type, tokens, active, width, device, stream):
        pointers = (POINTER(x), POINTER(places), POINTER(weights), POINTER(y))
        library.experts_sum_on_cpu(*pointers, type, LONG(tokens), active, LONG(width))

    def product(name):
        def launch(*, stack, type, device, stream, **given):
            struct = STRUCTS[name](stack=STACK(*stack.values()), **given)
            getattr(library, f"{name}_on_cpu")(ctypes.byref(struct), type, *here.device)

        return launch

    def gemv_(*, x, matrices, y, type, rows, device, stream, biases, **given):
        extras = EXTRAS(biases=(POINTER * 3)(*biases), **given)
        all_of = (MATRIX * len(matrices))(*(MATRIX(*each.values()) for each in matrices))
        run = library.mxfp4_gemv_on_cpu
        run(all_of, len(matrices), ctypes.byref(extras), POINTER(x), POINTER(y), type, rows, *here.device)

    def dequantize(*, codes, scales, out, type, count, device, stream):
        library.mxfp4_dequantize_on_cpu(POINTER(codes), POINTER(scales), POINTER(out), type, LONG(count))

    module = SimpleNamespace(
        route=route, router=router, mxfp4_gemv=gemv_, mxfp4_dequantize=dequantize,
        experts_sort=sort, experts_sum=sum_,
        **{name: product(name) for name in ("experts_gate_up", "experts_down", "experts_gemm")},
    )  # fmt: skip
    monkeypatch.setattr(kernels, "module", lambda: module)
    for wrapper in (experts, grouped, mxfp4_kernel):
        monkeypatch.setattr(wrapper, "check_cuda", lambda *given: None)
        monkeypatch.setattr(wrapper, "place", lambda tensor: {"device": 0, "stream": 0})
    return here
