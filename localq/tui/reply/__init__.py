"""Replies drawn as they stream."""
