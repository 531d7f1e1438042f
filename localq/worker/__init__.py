"""The engine process and the front end's end of its pipe: one process with torch per model, JSON lines between them.

Client side, without torch: `client.py` (start, load, generate), `process.py` and `pipes.py` (the process and its
pipes), `recovery.py` and `probe.py` (after a death), `messages.py` (both sides).
Engine side: `server.py` (the process), `backend.py` (the engine behind it), `token_masks.py` (grammars as token masks),
`thinking_budget.py` (the end of a thought at its budget), `faults.py` (fatal errors of a device).
Not here: conversations and text (`localq.chat`), the engine itself (`localq.engine`). Called by `chat`, `cli` and
`tui`. Open `client.py` first.
"""
