"""Conversations as data: the tree of turns, its database, snapshots of the KV cache, export.

conversation        the tree of turns and its current branch. Open this file first
tool_rounds         tool calls and results of a reply
record              a conversation as it is saved: with model, title, settings
store               the SQLite database
snapshot_keeper     when a snapshot is saved and restored; snapshot_files: its place on disk, and eviction
export              a conversation as Markdown or JSON

Called by `chat.session`, the slash commands and the list of conversations in the TUI. Not here: generating replies
(`chat.session`), the content of a snapshot (`engine.snapshot`).
"""
