"""Background work of screens, and what it reports.

job                 a thread that no one waits for, with a result. Open this file first
thread_messages     progress and notices of a thread as Textual messages
model_jobs          open, load and fetch a model; model_handle: an open model
command_host        the TUI as host of slash commands; chat_app: the app as screens and jobs see it

Used by `tui.app`, `tui.chat` and `tui.models`. Not here: replies and commands in a thread (`tui.chat.session_job`).
"""
