"""The full-screen chat, drawn with Textual. Widgets draw and post messages; `localq.chat.session` decides."""
