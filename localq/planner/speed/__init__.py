"""Predicted decoding speed of a model on a card.

Here: the prediction (`predict`), the times of kernels that it is made from (`measurements`, read from
data/measurements.toml), published facts of cards (`cards`), the fastest that a card could be (`roofline`), and what was
measured on this machine (`local_measurements`).
Not here: measuring itself (`localq.bench`).
Called by the planner, `localq bench` and the instruments of the screen. Torch-free.
Open first: predict.py.
"""
