"""How other rooms reach the arbiter: the one actor they know by name.

Every call raises `NoArbiterError` when nobody answers in time (`ArbiterSilentError` where there is one all the same);
callers go on with what they heard last.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from tidegate.arbiter.decide import Forecast
from tidegate.arbiter.messages import (
    ClaimSpec,
    GangOrders,
    GangReport,
    GatewayReport,
    Grant,
    HealthReport,
    JournalEntry,
    Orders,
    ReplicaReport,
    Seat,
    Verdict,
    Weights,
)
from tidegate.errors import ArbiterSilentError, NoArbiterError, TidegateError
from tidegate.ids import ClaimId, GpuId, Tier
from tidegate.spec.policy import Policy

ACTOR_NAME = "arbiter"
NAMESPACE = "tidegate"
ON_HEAD = {"node:__internal_head__": 0.001}
"""Resources that put an actor on the head: Ray gives this one to whichever node is the head now, so the actor comes
back on a restarted head too, which has a new node id."""

BACK_WITHIN_S = 120.0
"""An arbiter that was killed, and be it with its head, is back sooner."""
ASK_AGAIN_S = 0.2


class ArbiterClient:
    """Calls the arbiter by name, so it survives the arbiter's restart. Needs `ray.init` (an actor has it)."""

    def __init__(self, timeout_s: float = 5.0, *, patience_s: float = 0.0) -> None:
        """
        Args:
            timeout_s: how long one call waits.
            patience_s: for how long an arbiter that is silent is asked again. All it is asked for may come twice.
        """
        self._timeout_s = timeout_s
        self._patience_s = patience_s
        self._actor: Any = None
        self._finding: asyncio.Future[Any] | None = None

    # A room that reports

    async def exchange(self, report: GatewayReport, wait_s: float = 0.0) -> Orders:
        """A gateway's report; the answer is what it does next. It comes when that is new, or after `wait_s`."""
        orders: Orders = await self._ask("exchange", report, wait_s)
        return orders

    async def report_health(self, report: HealthReport) -> dict[GpuId, Seat]:
        """A node's report; the answer is whose ranks compute on its GPUs, and how their gangs do."""
        seats: dict[GpuId, Seat] = await self._ask("report_health", report)
        return seats

    async def report_replica(self, app: str, report: ReplicaReport) -> Weights | None:
        """A replica's report; the answer is what it should serve, None where nothing was published."""
        weights: Weights | None = await self._ask("report_replica", app, report)
        return weights

    async def report_gang(self, report: GangReport) -> GangOrders:
        """A gang's report; the answer is what it does next."""
        orders: GangOrders = await self._ask("report_gang", report)
        return orders

    async def note(self, entry: JournalEntry) -> None:
        """Write something seen into the journal, for `tidegate why`."""
        await self._ask("note", entry)

    # A run

    async def claim(self, spec: ClaimSpec) -> ClaimId:
        """File a claim. Filing the same name and owner again answers with the claim that stands.

        Raises:
            ClaimNeverFitsError: the cluster could not give it even if everybody left.
        """
        claim: ClaimId = await self._ask("claim", spec)
        return claim

    async def grant(self, claim: ClaimId, wait_s: float = 2.0) -> Grant | None:
        """The grant, or None if it isn't there after `wait_s`.

        Raises:
            ClaimUndoneError: with the arbiter's reason.
        """
        grant: Grant | None = await self._ask("grant", claim, wait_s)
        return grant

    async def release(self, claim: ClaimId, reason: str) -> None:
        """Let go of a claim: undone if it does not run yet, else its GPUs go back.

        Raises:
            UnknownSubjectError: there is no such claim.
        """
        await self._ask("release", claim, reason)

    # People and start-up

    async def policy(self) -> Policy:
        policy: Policy = await self._ask("policy")
        return policy

    async def status(self) -> dict[str, Any]:
        status: dict[str, Any] = await self._ask("status")
        return status

    async def why(self, subject: str) -> tuple[JournalEntry, ...]:
        entries: tuple[JournalEntry, ...] = await self._ask("why", subject)
        return entries

    async def forecast(self, spec: ClaimSpec) -> Forecast:
        """What would become of this claim; nothing is filed. Raises as `claim` does."""
        forecast: Forecast = await self._ask("forecast", spec)
        return forecast

    async def quarantine(self, subject: str, tier: Tier, reason: str) -> Verdict:
        """Keep a GPU or a node from gangs. Raises UnknownSubjectError."""
        verdict: Verdict = await self._ask("quarantine", subject, tier, reason)
        return verdict

    async def pardon(self, subject: str, reason: str) -> None:
        """End every quarantine on a GPU or a node. Raises UnknownSubjectError."""
        await self._ask("pardon", subject, reason)

    async def publish(self, app: str, uri: str) -> Weights:
        weights: Weights = await self._ask("publish", app, uri)
        return weights

    async def _ask(self, method: str, *args: object) -> Any:
        ends_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await self._ask_once(method, *args)
            except ArbiterSilentError:
                if time.monotonic() >= ends_s:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)

    async def _ask_once(self, method: str, *args: object) -> Any:
        try:
            if self._actor is None:
                self._actor = await self._find()
            return await asyncio.wait_for(getattr(self._actor, method).remote(*args), self._timeout_s)
        except ray.exceptions.RayTaskError as error:
            # `cause` is the error as it was raised; what Ray raises prints the arbiter's traceback with it.
            if isinstance(error.cause, TidegateError):
                raise error.cause from None
            raise
        except (ValueError, ray.exceptions.ActorDiedError) as error:
            # A restarted arbiter answers by the same handle; only one that is gone for good must be looked up anew.
            self._actor = None
            raise NoArbiterError(str(error)) from None
        except TimeoutError:
            raise ArbiterSilentError(f"no answer within {self._timeout_s:g} s") from None
        except ray.exceptions.RayError as error:
            raise ArbiterSilentError(str(error) or type(error).__name__) from None

    async def _find(self) -> Any:
        """In a thread, one at a time: Ray's lookup blocks while the head is away, and gateways must go on answering."""
        if self._finding is None or self._finding.done():
            lookup = asyncio.to_thread(ray.get_actor, ACTOR_NAME, namespace=NAMESPACE)
            self._finding = asyncio.ensure_future(lookup)
        return await asyncio.wait_for(asyncio.shield(self._finding), self._timeout_s)
