"""Codebooks fitted layer by layer."""
