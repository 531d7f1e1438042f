"""Making weights of two bits: what a model does on calibration text decides which codes its matrices get.

`layer.py` takes one layer after the other, `statistics.py` says what is lost where, `encode.py` chooses codes and
codebooks, `fold.py` turns the model so that no weight stands out.
"""
