"""Saved conversations and their snapshots. Torch-free."""
