"""Secrets come from the environment or from files, never from `policy.yaml`; only their names may be shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tidegate.errors import PolicyError

KEY_CHARS_MIN = 16
"""Shorter ones can be guessed."""


def read_secrets(where: str, env: str | None, file: str | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The secrets that a setting points to: one from an environment variable, or one a line from a file.

    `where` is the setting's path (`tenants.acme.key`), for the message.

    Raises:
        PolicyError: it is not there, empty or too short. The text never holds any of it.
    """
    if env is not None:
        name, lines = f"{where}_env: the environment variable {env}", [environ.get(env, "")]
    elif file is not None:
        name = f"{where}_file: {file}"
        try:
            lines = Path(file).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise PolicyError((f"{name}: cannot be read: {type(error).__name__}",)) from None
    else:
        return ()
    secrets = tuple(line.strip() for line in lines if line.strip())
    if not secrets:
        raise PolicyError((f"{name} is empty or not set; set it where the gateways run",))
    if any(len(secret) < KEY_CHARS_MIN for secret in secrets):
        raise PolicyError((f"{name}: a secret must have at least {KEY_CHARS_MIN} characters",))
    return secrets
