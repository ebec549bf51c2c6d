"""One gateway's counts: for its report to the arbiter, and as metrics beside Ray's own."""

from __future__ import annotations

from ray.util.metrics import Counter, Gauge, Histogram

from tidegate.serve.ledger import Outcome

_SECONDS = [0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0]


class Tally:
    def __init__(self) -> None:
        self.local = self.spilled = self.refused = self.failed = 0
        tags = ("backend_kind", "outcome")
        self._requests = Counter(
            "tidegate_requests_total", "Requests that ended, by where they were made and how they ended.", tags
        )
        self._seconds = Histogram(
            "tidegate_request_seconds", "From accepting a request to its end, in seconds.", _SECONDS, tags
        )
        self._waiting = Gauge("tidegate_requests_waiting", "Requests accepted and not yet sent anywhere.")

    def count(self, outcome: Outcome, backend: str | None, took_s: float) -> None:
        """`backend` is `local/<pool>`, `provider/<name>` or None."""
        kind = kind_of(backend)
        self.local += outcome is Outcome.ANSWERED and kind == "local"
        self.spilled += outcome is Outcome.ANSWERED and kind == "provider"
        self.refused += outcome is Outcome.REFUSED
        self.failed += outcome is Outcome.FAILED
        tags = labels_of(outcome, backend)
        self._requests.inc(1.0, tags)
        self._seconds.observe(max(took_s, 1e-6), tags)

    def waiting(self, waiting: int) -> None:
        self._waiting.set(waiting)


def kind_of(backend: str | None) -> str:
    return "none" if backend is None else backend.partition("/")[0]


def labels_of(outcome: Outcome, backend: str | None) -> dict[str, str]:
    """All that a request's series tells of it: nothing that a caller chooses, so that series stay few."""
    return {"backend_kind": kind_of(backend), "outcome": outcome.value}
