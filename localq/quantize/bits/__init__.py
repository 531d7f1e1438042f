"""Mixed bit widths: `mixture.py` spends a budget of bits on the schemes of vq2, `binary_mixture.py` on those of bcq.

Sensitivities come from `model/sensitivity.py`. Called by `by_layer` and `by_tensor`. Open `mixture.py` first.
"""
