"""What an adapter promises: one call, one answer or one of two errors. It never retries by itself."""

from __future__ import annotations

from typing import Protocol

from tidegate.ids import ProviderName
from tidegate.serve.work import ImageJob, Made


class ProviderError(Exception):
    """An attempt that gave no pictures."""

    def __init__(self, provider: ProviderName, why: str) -> None:
        super().__init__(provider, why)
        self.provider, self.why = provider, why

    def __str__(self) -> str:
        return f"provider {self.provider}: {self.why}"


class ProviderRefusedError(ProviderError):
    """It says clearly that it made nothing (or was never reached): another one may be tried."""

    def __init__(
        self,
        provider: ProviderName,
        why: str,
        *,
        retry_after_s: float | None = None,
        status: int | None = None,
        this_request_only: bool = False,
    ) -> None:
        super().__init__(provider, why)
        self.retry_after_s, self.status = retry_after_s, status
        self.this_request_only = this_request_only
        """The provider is well; it just won't make this one (a 400, say)."""


class ProviderAmbiguousError(ProviderError):
    """The request was sent and no sound answer came back: it may have been made and charged."""


class WrongPictureError(ProviderAmbiguousError):
    """A picture came, and it isn't what was asked for: another size, another format, or none at all."""


class ImageProvider(Protocol):
    name: ProviderName

    async def make(self, job: ImageJob, *, timeout_s: float, now_s: float) -> Made:
        """Make the job's pictures, all of them, of the asked size, or none.

        `timeout_s` bounds the whole attempt; `now_s` is the wall clock, for a `Retry-After` given as a date.

        Raises:
            ProviderRefusedError: nothing was made.
            ProviderAmbiguousError: it may have been made and charged.
        """

    async def aclose(self) -> None:
        """Close the connections."""
