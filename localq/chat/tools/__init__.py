"""Tools of MCP servers in a chat: the model calls them, the user allows each call, and the results go to the model.

toolbox         servers, their tools, one call at a time. Open this file first
tool_use        the calls of a reply: asked for, run, recorded; permissions: what the user allows, and the question
servers         what `--mcp` and the table `[mcp]` name: a command or an address
mcp_client      connections to servers, in a thread with an event loop of its own
transports      a server's process and its address, with limits; server_process: the program that runs its command
arguments       whether the arguments of a call match what a tool takes; results: what a server returns, as text

The package `mcp` is imported in the thread of the first connection only: a chat without `--mcp` does not pay for it,
and may lack it. Servers are strangers: their texts are sanitized and limited, they get no answers of the model
(sampling), no questions to the user and no folders, and what they say is never a command.
Called by `chat.session` and the front ends. Not here: how models write calls (`text.tools`).
"""
