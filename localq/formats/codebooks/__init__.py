"""Additive vector quantization: AQLM and vq2."""
