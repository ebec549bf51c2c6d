"""Capacity outside, one adapter a file. A new kind: its file, one line in `KINDS`, its name in `ProviderSpec.kind`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidegate.serve.providers.base import ImageProvider
from tidegate.serve.providers.fal import FalProvider
from tidegate.serve.providers.openai import OpenAIProvider
from tidegate.serve.providers.replicate import ReplicateProvider
from tidegate.spec.providers import ProviderSpec

KINDS: Mapping[str, Callable[[ProviderSpec], ImageProvider]] = {
    "openai": OpenAIProvider,
    "fal": FalProvider,
    "replicate": ReplicateProvider,
}


def connect(spec: ProviderSpec) -> ImageProvider:
    """The adapter for a provider. Opens no connection yet."""
    return KINDS[spec.kind](spec)
