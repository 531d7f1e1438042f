"""The type of weights on the CPU, by what the processor multiplies."""

from __future__ import annotations

import pytest

from localq.planner import ram

X86 = "processor\t: 0\nmodel name\t: A Xeon\nflags\t\t: fpu avx2 avx512f {}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}\nCPU implementer\t: 0x41\n\n"


@pytest.fixture
def dtype_of(tmp_path, monkeypatch):
    """`cpu_dtype` of a machine with this /proc/cpuinfo; None: there is none."""

    def of(text: str | None) -> str:
        monkeypatch.setattr(ram, "CPU_FLAGS", tmp_path / "cpuinfo")
        if text is not None:
            ram.CPU_FLAGS.write_text(text)
        ram.cpu_dtype.cache_clear()
        return ram.cpu_dtype()

    yield of
    ram.cpu_dtype.cache_clear()


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        (X86.format("avx512_bf16"), "bfloat16"),
        (X86.format("amx_bf16 amx_tile"), "bfloat16"),
        (X86.format("avx512_vnni"), "float32"),
        (ARM.format("bf16 i8mm"), "bfloat16"),
        (ARM.format("asimddp"), "float32"),
        (None, "float32"),
    ],
)
def test_weights_are_in_bfloat16_where_the_processor_multiplies_it(dtype_of, text, dtype):
    assert dtype_of(text) == dtype
