"""Mixtures of experts in a decode step, for all formats: router, gate and up, down, each in one launch.

`kernel.py` has the launches, `stacks.py` what they take as the experts of a layer. Experts in codebooks are multiplied
by `formats.codebooks.experts_kernel`, which `kernel.py` calls. Called by `engine.step`. Open `kernel.py` first.
"""
