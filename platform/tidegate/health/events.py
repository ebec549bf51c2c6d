"""One event from several tellers is one event. The kernel log has the words, so it goes first where it can be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tidegate.health.readings import ListedGpu, Reading, Signal

KERNEL = "kmsg"
HOLD_S = 1.5
"""How long what NVML tells waits for the kernel log's line on the same XID, which says more."""
_OFF_THE_BUS = 79.0
_OFF_THE_BUS_S = 300.0
"""The kernel tells a GPU's fall off the bus twice, as an XID and as three lines, minutes apart at most (C144)."""

_Key = tuple[str, float | None]


class EventFilter:
    """Keeps, of the XIDs that different feeds tell, one each. Lines of the kernel log are never the same as each other:
    of two NVLink XIDs one may be fatal and the other not."""

    def __init__(self) -> None:
        self._told: dict[_Key, tuple[float, str]] = {}
        """When, and by whom."""
        self._held: list[tuple[float, str, float, Reading]] = []

    def admit(self, told: Iterable[tuple[str, float, Reading]], *, kernel_answers: bool, now_s: float) -> list[Reading]:
        """Those of the events told just now, as (feed, lag, event), and of those held back, that are news.

        `lag`: how much later than the event this feed may tell it, seconds.
        """
        admitted: list[Reading] = []
        arrived = [(now_s, feed, lag_s, event) for feed, lag_s, event in told]
        # The kernel's own words first, whatever order the feeds came in.
        for since_s, feed, lag_s, event in sorted((*self._held, *arrived), key=lambda entry: entry[1] != KERNEL):
            if not self._is_news(event, feed, lag_s, now_s):
                continue
            if feed != KERNEL and kernel_answers and now_s - since_s < HOLD_S:
                continue
            self._told[event.subject, event.value] = (now_s, feed)
            admitted.append(event)
        news = {id(event) for event in admitted}
        self._held = [
            entry
            for entry in (*self._held, *arrived)
            if id(entry[3]) not in news
            and entry[1] != KERNEL
            and kernel_answers
            and now_s - entry[0] < HOLD_S
            and self._is_news(entry[3], entry[1], entry[2], now_s)
        ]
        self._told = {key: at for key, at in self._told.items() if now_s - at[0] <= _OFF_THE_BUS_S}
        return admitted

    def _is_news(self, event: Reading, feed: str, lag_s: float, now_s: float) -> bool:
        at_s, by = self._told.get((event.subject, event.value), (-1e18, feed))
        if event.value == _OFF_THE_BUS:
            return now_s - at_s > _OFF_THE_BUS_S
        return by == feed or now_s - at_s > lag_s


def named(event: Reading, gpus: Sequence[ListedGpu]) -> Reading:
    """An event of the kernel log under its GPU's UUID; under its PCI address if no GPU is known there."""
    if event.signal is not Signal.GPU_XID or not event.subject.startswith("pci:"):
        return event
    address = event.subject.removeprefix("pci:")
    return next((event._replace(subject=gpu.uuid) for gpu in gpus if gpu.pci == address), event)
