"""A clock that stands still until it is told to move."""


class FakeClock:
    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        self._now_s += by_s
