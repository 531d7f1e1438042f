"""Perplexity and divergence."""
