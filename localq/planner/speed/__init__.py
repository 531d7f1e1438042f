"""Predicted speed: measured kernels, cards, the fit between them. Torch-free."""
