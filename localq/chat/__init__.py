"""Conversations with a loaded model, for every front end. Torch-free."""
