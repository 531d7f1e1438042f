"""The Hugging Face Hub and its cache: metadata, downloads, places. Torch-free."""
