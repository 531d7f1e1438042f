"""GGUF files, read as if they were Hugging Face folders.

Here: the container (`binary`), models in several files (`splits`), metadata as a configuration (`reader`, `config`,
`facts`, `rope`), tensors under their Hugging Face names (`names`, `directory`) in stored layouts (`layout`), their
values (`tensors`, `block_types`), what of them a GPU keeps in blocks (`packing`), and the tokenizer (`vocab`).
Not here: writing; which files of a repository are one model (`files.gguf_choice`).
Called by `files.model_folder`, `formats.checkpoint` and `text.tokenizer`. Torch-free; numpy only for tensors.
Open first: reader.py.
"""
