"""The full-screen chat, drawn with Textual. Widgets draw and post messages; `chat.session` decides.

app                 which screen is shown, opening and switching models, quitting. Open this file first
keys                the keys of `localq.keymap` as Textual bindings; preload: modules imported after the first frame
chat/               the chat screen: transcript, prompt, status line, list of conversations
reply/              replies drawn as Markdown while they stream
models/             the model picker and the opening screen
instruments/        speed, memory, kernel times, the card
dialogs/            help, settings, palette, themes
jobs/               background work: opening, fetching, slash commands
terminal/           terminal input and output, key priority, signals

Started by `cli/verbs/tui`. Imports that only a later screen needs are deferred, so that the first frame is
quick; the comment "start-up cost" marks them.
"""
