"""Random weights of a catalogued architecture."""
