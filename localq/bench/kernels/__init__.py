"""Kernels measured one by one."""
