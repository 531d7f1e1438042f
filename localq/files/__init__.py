"""Facts about models: in the catalogue, on the Hugging Face hub and on the disk.

Here: names (`catalog`), shapes (`architecture`, `model_types`), formats (`format_facts`, `format_sizes`, `schemes`,
`stored_format`), model folders and their headers, the models on this machine (`local_models`; of ollama and LM Studio
`other_stores`), GGUF models of a repository (`gguf_choice`). Downloads are in `hub`, uploads in `publish`, .gguf files
in `gguf`.
Not here: memory and speed (`localq.planner`), and the tensors themselves (`localq.formats`).
Called by every package above. Torch-free.
Open first: catalog.py for a name, format_facts.py for a format, model_types.py for an architecture.
"""
