"""What an object store's error means, decided by its HTTP status: codes and messages may be missing.

A throttled HEAD has no body, and proxies and stores that speak S3's protocol answer 503 without S3's XML, so that
botocore's error then has no readable code and `None` for a message. The status is always there.
"""

from __future__ import annotations

from enum import StrEnum

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)

from tidegate.errors import CheckpointError

_THROTTLING_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"})


class Trouble(StrEnum):
    THROTTLED = "throttled"
    SERVER = "the store has an error of its own"
    NETWORK = "the store cannot be reached"
    MISSING = "not there"
    REFUSED = "refused: check the credentials and what they allow"
    NO_CREDENTIALS = "no credentials: give them as boto3 finds them (environment, ~/.aws, the machine's role)"
    OTHER = "not possible"

    @property
    def passes(self) -> bool:
        """Trying again later may help, with nothing changed."""
        return self in (Trouble.THROTTLED, Trouble.SERVER, Trouble.NETWORK)


def classify(error: BotoCoreError | ClientError) -> Trouble:
    if isinstance(error, ClientError):
        return _by_status(status_of(error), str((error.response.get("Error") or {}).get("Code") or ""))
    if isinstance(error, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError | ProfileNotFound):
        return Trouble.NO_CREDENTIALS
    if isinstance(error, ConnectionError | HTTPClientError | IncompleteReadError):
        return Trouble.NETWORK
    return Trouble.OTHER


def _by_status(status: int, code: str) -> Trouble:
    if status in (429, 503) or code in _THROTTLING_CODES:
        return Trouble.THROTTLED
    if status >= 500:
        return Trouble.SERVER
    if status == 404:
        return Trouble.MISSING
    if status in (401, 403):
        return Trouble.REFUSED
    return Trouble.OTHER


def status_of(error: ClientError) -> int:
    """HTTP's; 0 where the error was made without an answer."""
    return int((error.response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)


class StoreError(CheckpointError):
    """A request to the object store failed for good, after botocore's own retries."""

    def __init__(self, what: str, trouble: Trouble, detail: str) -> None:
        super().__init__(what, trouble, detail)
        self.what, self.trouble, self.detail = what, trouble, detail

    def __str__(self) -> str:
        return f"{self.what}: {self.trouble}" + (f" ({self.detail})" if self.detail else "")


def store_error(what: str, error: BotoCoreError | ClientError) -> StoreError:
    """`what`: the address that the request was about."""
    if not isinstance(error, ClientError):
        return StoreError(what, classify(error), " ".join(str(error).split()))
    code = str((error.response.get("Error") or {}).get("Code") or "")
    said = [f"HTTP {status_of(error)}"] if status_of(error) else []
    # Without a body botocore puts the status where the code should be.
    said += [code] if code and not code.isdigit() else []
    return StoreError(what, classify(error), " ".join(said))
