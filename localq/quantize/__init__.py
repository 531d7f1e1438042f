"""Conversions: full-precision weights in, a quantized model folder out. All of them resume after an interruption.

    by_tensor   formats made tensor by tensor: nf4, mxfp4, bcq, squeezellm
    by_layer    formats made layer by layer on calibration text: vq2, aqlm2x8 (`target.py`)
    codebooks/  the search of codes and codebooks for one layer, fine-tuning, joint training
    binary/     bcq on calibration text
    bits/       mixed bit widths: which matrix gets how many bits
    model/      the source model layer by layer, the text streams, input statistics, rotations, sensitivities
    output/     the output folder, shards, and files to resume from

Not here: the formats themselves (`localq.formats`), what `localq quantize` asks and prints (`cli/verbs/quantize`).
Called by that verb, in the process that has torch, and by `localq.bench`. Open `by_layer.py` first.
"""
