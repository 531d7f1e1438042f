"""Tokenizers, chat templates, grammars and reply channels. Torch-free."""
