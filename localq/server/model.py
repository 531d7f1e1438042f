"""The model that a job wants (`ModelRequest`), and the loaded one as the job sees it (`OpenModel`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq.chat.open_options import OpenOptions
from localq.server.job_client import JobClient
from localq.settings import OF_ENGINE, Settings

if TYPE_CHECKING:
    from localq.sampling import Sampling
    from localq.text.tokenizer import Tokenizer
    from localq.worker.messages import Load, Loaded


@dataclass(frozen=True)
class ModelRequest:
    """A model: its name as `catalog.resolve` takes it, the settings of its load, format and consent."""

    name: str
    settings: Settings = Settings()  # noqa: RUF009 - it is frozen
    wanted: OpenOptions = OpenOptions()  # noqa: RUF009

    def same_load(self, other: ModelRequest) -> bool:
        """Return whether a model that is loaded for `other` also serves this request."""
        return (self.name, self.wanted.format) == (other.name, other.wanted.format) and all(
            getattr(self.settings, name) == getattr(other.settings, name) for name in OF_ENGINE
        )


@dataclass(frozen=True)
class OpenModel:
    """The loaded model, as a job sees it.

    client    for replies of this job only
    sampling  the defaults of the model and of the settings
    request   of its load
    """

    name: str
    tokenizer: Tokenizer
    client: JobClient
    loaded: Loaded
    sampling: Sampling
    settings: Settings
    request: Load
    max_tokens: int | None = None
