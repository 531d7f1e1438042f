"""Integers of 2 to 8 bits with a scale and a zero point per group: AWQ, GPTQ, compressed-tensors; read, not made here.

`awq.py`, `gptq.py` and `compressed.py` specify files; AutoRound's are those of the first two, or of the third.
`codec.py` has the common form of 4 bits in memory and its arithmetic, which 2 and 3 bits share, `eight_bits.py` that
of 8 bits; `widths.py` chooses between the two. `read.py` checks checkpoints, `tiles.py` is the order that kernels of 4
bits read, `linear.py` the module, `kernel.py` the launches; of 8 bits see `formats.scaled`. Open `codec.py` first.
"""
