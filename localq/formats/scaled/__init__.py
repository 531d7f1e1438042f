"""Weights whose scales lie apart from their codes, as kernels take them: NVFP4, FP8, integers of 8 bits.

Not a format: `formats.nvfp4`, `formats.fp8` and, for 8 bits, `formats.int4` share `linear.py`, the order of `tiles.py`
and the launches of `kernel.py`. Open `kernel.py` first.
"""
