"""`localq serve`: the model for other programs, over HTTP on this machine. No torch.

slot          one engine, many requests: a fair queue, cancel, model switch, unload when idle. `ticket`: one job
model         which model a request means, and how it is opened
app           routes; `api/` has one file an API: chat completions, completions, responses, messages, models
request       a reply as all APIs ask for it; `reply` makes it, `events` are what it yields
guard         Host, Origin, keys and sizes, before any work; `protocol`: times and sizes of a connection
serve         the socket, uvicorn, signals

What is not here: the engine (`worker`), prompts and decoding (`text`, `chat`). Called by `cli.verbs.serve`. Open `slot`
first, then `app`. Limits, security and clients: README.md in this folder.
"""
