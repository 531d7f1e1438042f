"""Experts of a mixture in one launch."""
