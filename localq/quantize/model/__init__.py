"""The source model in a conversion, layer by layer, and what calibration text measures in it.

`source.py` reads layers, `fold.py` rotates them, `calibration_stream.py` runs the text through them; `statistics.py`,
`input_moments.py` and `sensitivity.py` measure, `matrix_groups.py` says which matrices belong together. Nothing here
chooses codes or writes the output. Called by `by_layer`, `by_tensor`, `codebooks`, `binary` and `bits`. Open
`source.py` first.
"""
