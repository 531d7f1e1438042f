"""The prompt with its completions."""

from __future__ import annotations

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message

from localq.chat.terminal.input_history import InputHistory
from localq.tui.chat import completions
from localq.tui.chat.completions import Completions
from localq.tui.chat.composer import Composer
from localq.tui.chat.part_cache import PartCache


class ComposerArea(PartCache, Vertical):
    """A `Composer` and its `Completions`; handles the messages about completions."""

    class Offered(Message):
        """File names that begin with `word` were found."""

        def __init__(self, word: str, found: list[tuple[str, str]]) -> None:
            super().__init__()
            self.word, self.found = word, found

    def __init__(self, past: InputHistory, id: str | None = None) -> None:
        super().__init__(id=id)
        self._past = past

    def compose(self) -> ComposeResult:
        """The list above the prompt."""
        yield Completions(id="completions")
        yield Composer(self._past, id="composer")

    def close_list(self) -> bool:
        """Close the list; return whether it was open."""
        was_open = self.part(Completions).display
        self._offer([])
        return was_open

    @on(Composer.WordTyped)
    def _word(self, message: Composer.WordTyped) -> None:
        message.stop()
        if message.word.startswith("/") and message.at_beginning:
            self._offer(completions.command_completions(message.word))
        elif message.word.startswith("@") and len(message.word) > 1:
            self._find_files(message.word)
        else:
            self._offer([])

    @work(thread=True, exclusive=True, group="completing")
    def _find_files(self, word: str) -> None:
        self.post_message(self.Offered(word, completions.file_completions(word)))

    def on_composer_area_offered(self, message: Offered) -> None:
        """Show found names, unless the word has changed."""
        if message.word == self.part(Composer).word():
            self._offer(message.found)

    def _offer(self, found: list[tuple[str, str]]) -> None:
        self.part(Completions).offer(found)
        self.part(Composer).completing = bool(found)

    @on(Composer.CompletionMoved)
    def _move(self, message: Composer.CompletionMoved) -> None:
        message.stop()
        self.part(Completions).move(message.by)

    @on(Composer.CompletionTaken)
    def _take(self, message: Composer.CompletionTaken) -> None:
        message.stop()
        text = self.part(Completions).highlighted_text()
        if text is not None:
            self._complete(text)

    @on(Completions.Chosen)
    def _choose(self, message: Completions.Chosen) -> None:
        message.stop()
        self._complete(message.text)

    def _complete(self, text: str) -> None:
        composer = self.part(Composer)
        composer.replace_word(text if text.endswith("/") else f"{text} ")
        self._offer([])
        composer.focus()
