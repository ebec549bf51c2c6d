"""The stand-in provider as a process of its own, as in production: only its address is known to what is tested."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from tidegate.spec.providers import ProviderSpec


@dataclass(frozen=True)
class StandIn:
    url: str

    def control(self, **order: Any) -> None:
        httpx.post(f"{self.url}/control", json=order).raise_for_status()

    def stats(self) -> dict[str, int]:
        return dict(httpx.get(f"{self.url}/stats").json())

    def face(self, kind: str) -> dict[str, Any]:
        """Where a kind of provider finds its face, and by which name its model."""
        path = {"openai": "/v1", "fal": "/fal", "replicate": "/replicate/v1"}[kind]
        model = "stand-in-image" if kind == "openai" else "stand-in/image"
        return {"kind": kind, "base_url": f"{self.url}{path}", "models": {"tidegate-digits": model}}

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
