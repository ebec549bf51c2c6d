"""One thread that makes pictures: it steps those of many requests together, and lets them come and go between steps."""

from __future__ import annotations

import io
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from tidegate.serve.batching import parts, shown_after
from tidegate.serve.painters.base import Drawing, Painter, Stepped, Wish
from tidegate.serve.work import Partial, Size
from tidegate.train.sample import Cancelled

Made = tuple[tuple[bytes, ...], float]
"""PNGs, and the seconds of device time that they took."""


@dataclass(slots=True, eq=False)
class Order:
    """A request as the studio has it."""

    painter: Painter
    buckets: Mapping[Size, Mapping[int, float]]
    """By size: how many pictures to step at once, and the seconds that one such step takes."""
    wishes: Sequence[Wish]
    cancelled: Callable[[], bool]
    """Asked before each round of steps, in the studio's thread."""
    partials: int = 0
    show: Callable[[Partial], None] | None = None
    made: Future[Made] = field(default_factory=Future)
    begun: int = 0
    """Wishes that are, or were, on the table."""
    pngs: dict[int, bytes] = field(default_factory=dict)
    compute_s: float = 0.0
    asked: tuple[int, int] = (0, 0)
    """Steps done, of how many, by the picture that is furthest."""

    def __post_init__(self) -> None:
        self.made.set_running_or_notify_cancel()  # from here on only `cancelled` ends it

    @property
    def most(self) -> int:
        """Pictures that may be on the table at once."""
        return max(self.buckets[self.wishes[0].size])


@dataclass(slots=True, eq=False)
class _Sheet:
    """A picture on the table."""

    order: Order
    image: int
    drawing: Drawing
    shown_at: tuple[int, ...]


class Studio:
    def __init__(self) -> None:
        self._line: deque[Order] = deque()
        self._table: list[_Sheet] = []
        self._bell = threading.Condition()
        self._closed = False
        self.busy_since_s: float | None = None
        """`time.monotonic` at which the present round of steps began; None: idle."""
        # PNGs are packed while the device goes on.
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="png")
        self._thread = threading.Thread(target=self._work, name="studio", daemon=True)
        self._thread.start()

    def submit(self, order: Order) -> None:
        """Its `made` is set in time: to the pictures, `Cancelled`, or what went wrong."""
        with self._bell:
            if self._closed:
                raise RuntimeError("the studio is closed")
            self._line.append(order)
            self._bell.notify()

    def close(self) -> None:
        """What is at work or waits fails as `Cancelled`."""
        with self._bell:
            self._closed = True
            self._bell.notify()
        self._thread.join()
        self._packer.shutdown()

    def _work(self) -> None:
        while True:
            with self._bell:
                self.busy_since_s = None
                self._bell.wait_for(lambda: self._line or self._table or self._closed)
                if self._closed:
                    break
                self.busy_since_s = time.monotonic()
            self._drop_cancelled()
            self._fill_table()
            for sheets in self._batches():
                self._step(sheets)
        for order in dict.fromkeys([*(sheet.order for sheet in self._table), *self._line]):
            self._fail(order, Cancelled(*order.asked))

    def _orders(self) -> list[Order]:
        with self._bell:
            return list(dict.fromkeys([*(sheet.order for sheet in self._table), *self._line]))

    def _drop_cancelled(self) -> None:
        for order in self._orders():
            try:
                gone = order.cancelled()
            except BaseException as error:
                self._fail(order, error)
                continue
            if gone:
                self._fail(order, Cancelled(*order.asked))

    def _fill_table(self) -> None:
        """Take from the line in its order, as long as there is room beside what is on the table."""
        while self._line:
            order = self._line[0]
            stepped = isinstance(order.painter, Stepped)
            if len(self._table) >= (order.most if stepped else 1):
                return
            try:
                if stepped:
                    self._begin(order)
                else:
                    self._whole(order)
            except BaseException as error:
                self._fail(order, error)
                continue
            if order.begun == len(order.wishes):
                with self._bell:
                    self._line.popleft()

    def _begin(self, order: Order) -> None:
        assert isinstance(order.painter, Stepped)
        with _charged(order):
            drawing = order.painter.begin(order.wishes[order.begun])
        shown_at = shown_after(order.partials if order.show else 0, drawing.steps)
        self._table.append(_Sheet(order, order.begun, drawing, shown_at))
        order.begun += 1
        order.asked = (order.asked[0], drawing.steps)

    def _batches(self) -> Iterator[list[_Sheet]]:
        kinds: dict[tuple[int, tuple[Size, bool]], list[_Sheet]] = {}
        for sheet in self._table:
            kinds.setdefault((id(sheet.order.painter), sheet.drawing.kind), []).append(sheet)
        for sheets in kinds.values():
            left = list(sheets)
            for bucket in parts(len(left), left[0].order.buckets[left[0].drawing.size]):
                batch, left = left[:bucket], left[bucket:]
                yield batch

    def _step(self, sheets: list[_Sheet]) -> None:
        sheets = [sheet for sheet in sheets if sheet in self._table]
        if not sheets:
            return
        order = sheets[0].order
        painter, buckets = order.painter, order.buckets[sheets[0].drawing.size]
        assert isinstance(painter, Stepped)
        began_s = time.perf_counter()
        try:
            painter.step([sheet.drawing for sheet in sheets], min(size for size in buckets if size >= len(sheets)))
            ends = {sheet: self._look_at(painter, sheet) for sheet in sheets}
        except BaseException as error:
            for sheet in sheets:
                self._fail(sheet.order, error)
            return
        took_s = (time.perf_counter() - began_s) / len(sheets)
        for sheet, pixels in ends.items():
            sheet.order.compute_s += took_s
            if pixels is not None and sheet in self._table:
                self._table.remove(sheet)
                self._packer.submit(self._pack, sheet.order, sheet.image, pixels)

    def _look_at(self, painter: Stepped, sheet: _Sheet) -> np.ndarray | None:
        """The picture if it is done; an unfinished one is shown if it is time for that."""
        done, steps = sheet.drawing.done, sheet.drawing.steps
        sheet.order.asked = (max(done, sheet.order.asked[0]), steps)
        if done == steps:
            return painter.picture(sheet.drawing)
        if done in sheet.shown_at:
            pixels = painter.picture(sheet.drawing, unfinished=True)
            index = sheet.shown_at.index(done)
            self._packer.submit(self._show, sheet.order, sheet.image, index, pixels, (done, steps))
        return None

    def _whole(self, order: Order) -> None:
        """A bucket's worth of pictures after the other, nothing else meanwhile."""
        assert not isinstance(order.painter, Stepped)
        while order.begun < len(order.wishes):
            wishes = order.wishes[order.begun : order.begun + order.most]
            first, shown = order.begun, list[int]()

            def after(done: int, steps: int, unfinished: Callable[[], np.ndarray] | None) -> None:
                order.asked = (done, steps)
                self.busy_since_s = time.monotonic()
                if done and order.cancelled():
                    raise Cancelled(done, steps)
                if order.show and unfinished and done in shown_after(order.partials, steps):
                    for image, pixels in enumerate(unfinished(), first):  # noqa: B023
                        self._packer.submit(self._show, order, image, len(shown), pixels, (done, steps))  # noqa: B023
                    shown.append(done)  # noqa: B023

            with _charged(order):
                pictures = order.painter.paint(wishes, after)
            order.begun += len(wishes)
            for image, pixels in enumerate(pictures, first):
                self._packer.submit(self._pack, order, image, pixels)

    def _show(self, order: Order, image: int, index: int, pixels: np.ndarray, at: tuple[int, int]) -> None:
        if order.show is not None and not order.made.done():
            order.show(Partial(image=image, index=index, png=png(pixels), steps_done=at[0], steps=at[1]))

    def _pack(self, order: Order, image: int, pixels: np.ndarray) -> None:
        """In the packer's one thread: pictures of an order are counted without a lock."""
        try:
            order.pngs[image] = png(pixels)
        except BaseException as error:
            _settle(order.made, error)
            return
        if len(order.pngs) == len(order.wishes):
            pngs = tuple(order.pngs[number] for number in range(len(order.wishes)))
            _settle(order.made, (pngs, order.compute_s))

    def _fail(self, order: Order, error: BaseException) -> None:
        self._table = [sheet for sheet in self._table if sheet.order is not order]
        with self._bell:
            if order in self._line:
                self._line.remove(order)
        _settle(order.made, error)


class _charged:
    """Counts the block's seconds to an order."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._order.compute_s += time.perf_counter() - self._began_s


def _settle(made: Future[Made], end: Made | BaseException) -> None:
    """The first end of an order is its only one: studio and packer may each have one."""
    with _SETTLING:
        if made.done():
            return
        if isinstance(end, BaseException):
            made.set_exception(end)
        else:
            made.set_result(end)


_SETTLING = threading.Lock()


def png(pixels: np.ndarray) -> bytes:
    """(H, W) or (H, W, 3) uint8 as a PNG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()
