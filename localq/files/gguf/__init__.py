"""GGUF files read as if they were Hugging Face folders: header, weights, vocabulary. Torch-free."""
