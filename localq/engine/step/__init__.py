"""One decode step: a list of kernel launches on fixed buffers, captured as CUDA graphs.

`fused.py` builds the list from a model's modules and `operands.py`, with a file for each part: attention, experts,
recurrent layers, Gemma 4, MTP blocks; `graph.py` captures it, `state.py` holds what one step hands to the next,
`steps.py` chooses between graphs, launches and modules. Prefill is not here: it runs the modules. Called by
`engine.generate`. Open `fused.py` first.
"""
