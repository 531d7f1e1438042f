"""Benchmark rows, one file per family."""
