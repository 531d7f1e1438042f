"""The chat screen.

chat_screen         messages and keys of the screen; chat_layout: its parts. Open chat_screen first
conversation_view   draws what a job produces; conversation_jobs: one job at a time in a thread; session_job: a job
transcript_view     turns and notices; turn_view: one turn; transcript_lines: lines between turns
round_view          tool calls of a turn; call_screen: the question before a call
composer            the prompt; composer_area: with completions
reply_buffer        text received and not drawn yet
sidebar             place of the list of conversations; sessions_panel: the list; session_lines: its lines
status_line         one line below

Not here: drawing a reply (`tui.reply`), what a chat does (`chat.session`).
"""
