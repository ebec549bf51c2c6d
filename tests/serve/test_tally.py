"""A gateway's series: as many as there are kinds of backends and of outcomes, whatever callers ask for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tidegate.serve.admission import Limits, parse_size
from tidegate.serve.ledger import Outcome
from tidegate.serve.tally import labels_of
from tidegate.spec.policy import ArbiterSpec, Policy
from tidegate.testing.light_gateway import LightPools, build_app


def test_c183_ten_thousand_pools_and_users_are_no_series() -> None:
    backends = (None, *(f"{kind}/{name}" for kind in ("local", "provider") for name in range(10_000)))
    seen = {tuple(labels_of(outcome, backend).items()) for outcome in Outcome for backend in backends}
    assert len(seen) == 3 * len(Outcome)
    assert {name for labels in seen for name, _ in labels} == {"backend_kind", "outcome"}


def test_c181_a_thousand_paths_that_there_are_not_are_no_series(tmp_path: Path) -> None:
    """Only requests for pictures are counted; a path that matches no route ends before it is counted by anybody."""
    policy = Policy(arbiter=ArbiterSpec(state_dir=str(tmp_path)))
    limits = Limits(model="m", sizes=(parse_size("16x16"),), quality_steps={"low": 8}, waiting_max=1)
    app = build_app(policy, limits, LightPools(1, 0.0), "light")
    before = {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}

    async def ask() -> set[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
            return {(await client.get(f"/v1/files/{number}")).status_code for number in range(1, 1001)}

    assert asyncio.run(ask()) == {404}
    assert {path.name: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == before
