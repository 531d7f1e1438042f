"""Drafts: tokens that are likely to come next, which one pass of the model verifies together. Token ids only.

`drafter` proposes, from `lookup` (the text itself), from what a constraint forces and from a draft model (`model`) or
the MTP block of the model (`head`; only these two use torch); `policy` decides how many tokens a draft has, from the
acceptance, the cost of a pass of several rows and that of the draft model. `engine.step` verifies them. A wrong draft
costs time and never changes the text. Called by `engine.decode_loop`. Open `drafter` first.
"""
