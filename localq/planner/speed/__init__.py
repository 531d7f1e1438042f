"""Predicted decoding speed of a model on a card.

Here: the prediction (`predict`), the kernel times that it uses (`measurements`, read from data/measurements.toml),
published facts of cards (`cards`), the limit that bandwidth sets (`roofline`), and measurements of this machine
(`local_measurements`).
Not here: measuring (`localq.bench`).
Called by the planner, `localq bench` and the instruments of the screen. Torch-free.
Open first: predict.py.
"""
