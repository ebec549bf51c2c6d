"""Who may ask for pictures, and how much of them: the part `tenants` of `policy.yaml`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from tidegate.spec.base import Model

Count = Annotated[int, Field(ge=1)]


HedgeWord = Literal["never", "asked", "always"]


class TenantSpec(Model):
    """One caller. All limits are each gateway's own, or with `gateway_redis` those of all gateways together."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
    """In lower case; stands in the job store, never in a metric."""
    key_env: str | None = None
    """Name of the environment variable that holds the key; keys never stand in this file."""
    key_file: str | None = None
    """Or a file with one key a line: two of them while a key is being changed."""
    suspended: bool = False
    """Known, and not let in (403)."""
    requests_per_min: Count | None = None
    """So many at once, and evenly as many a minute; more are answered 429. None = no limit."""
    concurrent_max: Count | None = None
    """Requests that it may have open at a time; jobs have their own limit."""
    priority: Literal["interactive", "batch"] = "interactive"
    """Whose requests are placed first when several wait."""
    hedge: HedgeWord = "never"
    """May its requests be made, and bought, at two places where the first is slow (`serving.hedge_after_s`)? `asked`:
    those that say `hedge: true`; `always`: those that don't say `false`. The first answer counts, the other try is
    cancelled."""
    local_only: bool = False
    """Its requests never leave for a provider, whatever they say themselves."""

    jobs_running_max: Count | None = None
    """Of its jobs so many are made at a time; the others are `backlogged`. None = as many as the gateways take."""
    webhook_origins: tuple[Annotated[str, Field(pattern=r"^https?://[^/@\s]+$")], ...] = ()
    """Where its jobs' webhooks may go, `https://hooks.example.com`; none = it may ask for none."""
    webhook_secret_env: str | None = None
    """Name of the environment variable with the secret that signs its webhooks (Standard Webhooks: `whsec_` and
    base64)."""
    webhook_secret_file: str | None = None

    @model_validator(mode="after")
    def _webhooks_are_signed(self) -> TenantSpec:
        if bool(self.webhook_origins) != ((self.webhook_secret_env is None) != (self.webhook_secret_file is None)):
            raise ValueError(
                f"tenant {self.name!r}: webhook_origins needs webhook_secret_env or webhook_secret_file, one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_place_for_the_key(self) -> TenantSpec:
        if (self.key_env is None) == (self.key_file is None):
            raise ValueError(f"tenant {self.name!r} needs either key_env or key_file")
        return self
