"""Codes and codebooks of one layer, and training of codebooks, scales and norms.

`layer.py` quantizes a layer, `encode.py` its matrices (code search, then `refine.py`), from `initial_codebooks.py`;
`finetune.py` trains one layer, `joint_training.py` and `joint_output.py` all of them. The search kernels are in
`localq.formats.codebooks`. Called by `by_layer`. Open `layer.py` first.
"""
