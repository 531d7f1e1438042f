"""Memory, format, context and speed of models on a GPU, planned before a load.

Here: the memory of a model by component (`footprint`), and of each way to place it (`placement`, `costs`); the memory
of this machine or of a card that is not here (`room`, `ram`); the plan of a load (`plan`), the only check whether a
model fits; the weights that a name selects (`choose`, `offers`), the rows of `localq fit` (`fit_rows`), the reports of
`show`, `pull --dry-run` and `chat --dry-run`, and `prepare`, which turns a name into files. Predicted speed is in
`speed`.
Not here: bytes of a format (`files.format_facts`), and memory that a load takes (`engine.load`).
Called by every verb, the screens, and by `engine.load.plan`, which allocates by the same plan. Torch-free.
Open first: plan.py.
"""
