"""GGUF files, read as if they were Hugging Face folders.

Here: the container (`binary`), its metadata as a configuration (`reader`, `facts`, `rope`), tensors under their Hugging
Face names (`names`, `tensors`), and the tokenizer of the vocabulary (`vocab`).
Not here: writing, and mixtures of experts, which are refused.
Called by `files.model_folder`, `formats.checkpoint` and `text.tokenizer`. Torch-free; numpy only for tensors.
Open first: reader.py.
"""
