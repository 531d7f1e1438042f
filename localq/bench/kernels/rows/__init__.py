"""Rows of the kernel benchmark, one file per family of formats: products, and dequantization for prefill.

Called by `kernel_bench.py`. Open `nf4.py` first.
"""
