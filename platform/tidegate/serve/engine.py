"""Weights in memory that make pictures. No Ray here; one engine belongs to one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tidegate.errors import ModelRefusedError
from tidegate.serve.fitting import Room
from tidegate.serve.loading import Loaded, load
from tidegate.serve.options import EngineOptions
from tidegate.serve.painters.base import Wish
from tidegate.serve.studio import Made, Order, Studio
from tidegate.serve.warmup import Warm, held_bytes, limit_bytes, warm_up
from tidegate.serve.work import Partial, Size, UnfitError


@dataclass(frozen=True, slots=True)
class _Ready:
    loaded: Loaded
    warm: Warm


class Engine:
    """Loads, verifies, compiles and warms a folder of weights before it is ready.

    Raises:
        ModelRefusedError: it is incomplete or corrupt, or no size of it fits into memory.
    """

    def __init__(self, folder: Path, options: EngineOptions | None = None) -> None:
        self._options = options or EngineOptions()
        torch.set_num_threads(self._options.threads)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._ready = self._made_ready(folder, load(folder, self._device, self._options), None)
        self._studio = Studio()

    @property
    def export(self) -> str:
        """What serves now; see `Loaded.export`."""
        return self._ready.loaded.export

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self._ready.loaded.painter.sizes

    @property
    def warm(self) -> Warm:
        """What warm-up measured."""
        return self._ready.warm

    @property
    def busy_since_s(self) -> float | None:
        """`time.monotonic` at which the present round of steps began; None: idle. One that is long ago hangs."""
        return self._studio.busy_since_s

    def submit(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        size: Size | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        negative: str = "",
        cancelled: Callable[[], bool] = lambda: False,
        partials: int = 0,
        show: Callable[[Partial], None] | None = None,
    ) -> Future[Made]:
        """Have pictures made, one for each prompt and its seed: PNGs, and the seconds of device time they took.

        `cancelled` is asked between steps; then the future raises `tidegate.train.sample.Cancelled`. `show` is called
        from another thread, with up to `partials` unfinished pictures of each. Pictures are made with the weights that
        serve now, whatever is swapped in meanwhile.

        Raises:
            UnfitError: the size isn't made here, or doesn't fit into memory.
        """
        ready = self._ready
        size = ready.loaded.painter.sizes[0] if size is None else size
        if size not in ready.warm.buckets:
            raise UnfitError(
                "size", ready.warm.unfit.get(size, f"{size} is not among {', '.join(map(str, self.sizes))}")
            )
        wish = partial(Wish, size=size, steps=steps, guidance=guidance, negative=negative)
        wishes = [wish(prompt=prompt, seed=seed) for prompt, seed in zip(prompts, seeds, strict=True)]
        order = Order(ready.loaded.painter, ready.warm.buckets, wishes, cancelled, partials, show)
        self._studio.submit(order)
        return order.made

    def generate(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        *,
        size: Size | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        negative: str = "",
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Made:
        """As `submit`, and wait."""
        return self.submit(
            prompts, seeds, size=size, steps=steps, guidance=guidance, negative=negative, cancelled=cancelled
        ).result()

    def swap(self, folder: Path) -> None:
        """Serve another folder from the next request on. It is loaded, verified and warmed beside the one that serves
        meanwhile, so this needs room for both.

        Raises:
            ModelRefusedError: it is incomplete, corrupt, or makes another kind of picture. The old one keeps serving.
        """
        self._ready = self.stage(folder)  # orders at work have their own hold on the old one, and end with it

    def stage(self, folder: Path) -> _Ready:
        now, then = self._ready.loaded, load(folder, self._device, self._options)
        ours, theirs = (one.recipe.image if one.recipe else one.painter.sizes for one in (now, then))
        if ours != theirs:
            raise ModelRefusedError(
                str(folder), f"makes {theirs!r}, this app serves {ours!r}; deploy it as another app"
            )
        return self._made_ready(folder, then, self._ready.warm)

    def close(self) -> None:
        """End its thread; what it had at work fails."""
        self._studio.close()

    def _made_ready(self, folder: Path, loaded: Loaded, before: Warm | None) -> _Ready:
        room = Room(
            limit_bytes(self._device, self._options.memory_bytes),
            held_bytes(self._device) + self._options.embeddings_bytes,
        )
        warm = warm_up(loaded.painter, self._options.batch_max, room, self._device, before)
        if not warm.buckets:
            raise ModelRefusedError(str(folder), f"no size of it fits: {'; '.join(warm.unfit.values())}")
        return _Ready(loaded, warm)
