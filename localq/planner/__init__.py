"""Memory, format, context and speed of models on a GPU, planned before a load.

Here: the memory of a model by component (`footprint`), the plan of a load (`plan`), the weights that a name selects
(`choose`, `offers`), the rows of `localq fit` (`fit_rows`), the reports of `show`, `pull --dry-run` and
`chat --dry-run`, and `prepare`, which turns a name into files. Predicted speed is in `speed`.
Not here: bytes of a format (`files.format_facts`), and memory that a load takes (`engine.load`).
Called by every verb, the screens, and by `engine.load.plan`, which allocates by the same plan. Torch-free.
Open first: plan.py.
"""
