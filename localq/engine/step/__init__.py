"""The decode step: operands, launches, the CUDA graph."""
