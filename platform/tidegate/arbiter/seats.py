"""Who computes on which GPU, by the gangs' newest reports, and how each gang does as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tidegate.arbiter.messages import GangPhase, GangReport, HealthReport, Middle, Seat
from tidegate.arbiter.middles import middles_of, place_of
from tidegate.ids import ClaimId, GpuId

SILENT_S = 5.0
"""Who has not reported for this long is not known to compute."""

MIDDLES_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _Known:
    """What all GPUs of one gang do, worked out for all of its nodes at once."""

    at_s: float
    gpus: tuple[GpuId, ...]
    places: Mapping[GpuId, int]
    middles: Mapping[str, Middle]


@dataclass(slots=True)
class Seats:
    _claims: dict[GpuId, ClaimId] = field(init=False, default_factory=dict)
    """Whose rank stands on a GPU."""
    _known: dict[ClaimId, _Known] = field(init=False, default_factory=dict)

    def tell(self, before: GangReport | None, report: GangReport) -> None:
        """A gang's report, and the one before it."""
        if before is None or before.gpus != report.gpus:
            if before is not None:
                self.forget(before)
            self._claims.update(dict.fromkeys(report.gpus, report.claim))

    def forget(self, report: GangReport) -> None:
        """This gang, as it reported last."""
        self._known.pop(report.claim, None)
        for gpu in report.gpus:
            if self._claims.get(gpu) == report.claim:
                del self._claims[gpu]

    def at(
        self,
        gpus: Iterable[GpuId],
        gangs: Mapping[ClaimId, GangReport],
        fresh: Callable[[], Iterable[HealthReport]],
        now_s: float,
    ) -> dict[GpuId, Seat]:
        """Of these GPUs those on which gangs compute now. GPUs of one gang should do equally well, so each is told how
        the whole gang does. `gangs`: their newest reports; `fresh`: the agents' of late, asked for once a second for
        each gang."""
        found = {}
        for gpu in gpus:
            claim = self._claims.get(gpu)
            gang = gangs.get(claim) if claim is not None else None
            if gang is not None and gang.phase is GangPhase.RUNNING and now_s - gang.at_s <= SILENT_S:
                found[gpu] = self._seat(gang, gpu, fresh, now_s)
        return found

    def _seat(self, gang: GangReport, gpu: GpuId, fresh: Callable[[], Iterable[HealthReport]], now_s: float) -> Seat:
        known = self._known.get(gang.claim)
        if known is None or known.gpus != gang.gpus or not 0 <= now_s - known.at_s < MIDDLES_EVERY_S:
            known = _Known(now_s, gang.gpus, place_of(gang), middles_of(gang, fresh()))
            self._known[gang.claim] = known
        rank = known.places[gpu]
        return Seat(
            claim=gang.claim,
            pid=gang.pids[rank] if rank < len(gang.pids) else None,
            compute_s=gang.compute_s[rank] if rank < len(gang.compute_s) else None,
            middles=known.middles,
        )
