"""Additive vector quantization: AQLM (`aqlm.py`) and our vq2 (`vq2.py`), two formats with one definition.

`definition.py` says what codes and codebooks stand for, `linear.py` what their Linears share, `tiles.py` the order that
kernels read, `rotation.py` what vq2 does to its inputs. Kernels: `lookup_kernel` multiplies with codebooks of 256
entries, `gather_kernel` with larger ones, `dequantize_kernel` and `unpack_kernel` give plain weights, `experts_kernel`
runs mixtures; `search_kernel` and `adjoint_kernel` belong to quantizing. Quantizing itself is `localq.quantize`.
Open `definition.py` first.
"""
