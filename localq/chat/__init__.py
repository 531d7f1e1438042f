"""Conversations with a loaded model, shared by the line chat and the TUI. No torch, no drawing.

session             a running chat: ask, edit, regenerate, continue, save. Open this file first
open_model          name -> files -> tokenizer and engine process; open_conversation: new or resumed, and its store
prompt              token ids of a conversation, and which turns are left out when the context is full
partial_answer      an answer while it is made, with rounds of tool calls; tools/: MCP servers and what they may do
reply_stream        engine events -> pieces of text; reply: what a front end receives; reply_limits: what ends one
attachments         text files in a message
side_request        one-off requests outside the conversation (compaction, /bench)
history/            the tree of turns, its database, snapshots of the KV cache, export
commands/           slash commands
terminal/           clipboard, editor, input history, transfer rate: what both front ends use

Called by `cli/line`, `cli/verbs` and `tui`. Not here: tokenizers and templates (`text`), the engine process (`worker`).
"""
