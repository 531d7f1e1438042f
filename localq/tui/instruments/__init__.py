"""Instruments: memory, speed, kernels."""
