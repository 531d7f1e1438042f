"""Quality of a model: `evaluation.py` runs `localq eval`, `perplexity.py` scores a text, `tasks.py` replies.

`comparison.py` evaluates several models, `bits.py` counts bits per weight, `code_sandbox.py` runs functions of replies.
Windows of text come from `text/token_windows.py`, logits from `engine/scoring.py`.
Called by the verbs `eval` and `bench --formats`. Open `evaluation.py` first.
"""
