"""Binary-coding quantization (bcq) on calibration text: `layers.py` runs over the model, `matrix.py` encodes a matrix.

The format is in `localq.formats.bcq`. Called by `by_tensor`. Open `layers.py` first.
"""
