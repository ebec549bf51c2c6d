"""The stand-in provider as a process of its own, as in production: only its address is known to what is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from tidegate.spec.policy import ProviderSpec


@dataclass(frozen=True)
class StandIn:
    url: str

    def control(self, **order: Any) -> None:
        httpx.post(f"{self.url}/control", json=order).raise_for_status()

    def stats(self) -> dict[str, int]:
        return dict(httpx.get(f"{self.url}/stats").json())

    def spec(self, **more: Any) -> ProviderSpec:
        settings: dict[str, Any] = {
            "name": "stand-in",
            "base_url": f"{self.url}/v1",
            "models": {"tidegate-digits": "stand-in-image"},
            "price_per_image_usd": 0.01,
            "timeout_s": 5.0,
            "cooldown_s": 0.5,
        }
        return ProviderSpec(**(settings | more))


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False
