"""4-bit integers with a scale and a zero point per group: AWQ, GPTQ, compressed-tensors; read and not made here.

`awq.py`, `gptq.py` and `compressed.py` specify files; AutoRound's are those of the first two, or of the third.
`codec.py` has their common form in memory and the arithmetic, `read.py` checks checkpoints, `tiles.py` is the order
that kernels read, `linear.py` the module, `kernel.py` the launches. Open `codec.py` first.
"""
