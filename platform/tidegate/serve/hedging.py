"""Asking a second place for what the first is slow to make. Pure.

It costs a replica's time, or is paid for twice: so it is done only for requests whose caller may, and then says so.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from tidegate.serve.routing import RouteRequest, ToLocal, ToProvider, View, pick

Place: TypeAlias = ToLocal | ToProvider


def hedge_at_s(request: RouteRequest, started_at_s: float) -> float | None:
    """When a second place may be asked, if the first, asked at `started_at_s`, has not answered by then; None = never:
    it may not be made twice, or its deadline comes first."""
    if request.hedge_after_s is None:
        return None
    at_s = started_at_s + request.hedge_after_s
    return at_s if at_s < request.deadline_s else None


def second_place(request: RouteRequest, first: Place, view: View, now_s: float) -> Place | None:
    """Another place that would take it at once; None where there is none. Never the same pool or provider."""
    if request.hedge_after_s is None:
        return None
    match first:
        case ToLocal(pool):
            others = replace(request, excluded_pools=request.excluded_pools | {pool})
        case ToProvider(provider):
            others = replace(request, excluded_providers=request.excluded_providers | {provider})
    step = pick(replace(others, patience_until_s=min(now_s, request.patience_until_s)), view, now_s)
    return step if isinstance(step, ToLocal | ToProvider) else None
