"""4-bit integers with a scale and a zero point per group: AWQ (`awq.py`) and GPTQ (`gptq.py`), read and not made here.

`codec.py` has their common form in memory and the arithmetic, `read.py` checks checkpoints, `tiles.py` is the order
that kernels read, `linear.py` the module, `kernel.py` the launches. Open `codec.py` first.
"""
