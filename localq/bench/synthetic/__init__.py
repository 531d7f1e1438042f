"""Random weights in the shape of catalogued models, in every format: models that need no download.

`checkpoint.py` builds a checkpoint, `formats.py` and `experts.py` the tensors of a format, `tensors.py` the random
numbers; `sources.py` opens files or random weights. Nothing is written to disk. Called by `bench` and by tests. Open
`checkpoint.py` first.
"""
