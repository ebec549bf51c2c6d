"""A stand-in for a provider: a real HTTP process that draws cheap pictures, with three faces.

    python -m tidegate.testing.standin_provider --port 8901 --latency-s 0.2 --slots 8

- OpenAI's images API: `base_url` `http://…/v1`
- fal's queue: `http://…/fal`, model `stand-in/image`
- Replicate's predictions: `http://…/replicate/v1`, model `stand-in/image`

All share the slots, the latency and the script of faults. `POST /control` scripts faults and settings, `GET /stats`
counts. Every answer carries `x-tidegate-stand-in: true`: its pictures are coloured boxes, not a model's work.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import uvicorn
from fastapi import FastAPI

from tidegate.testing.standin_fal import add_fal
from tidegate.testing.standin_jobs import Jobs
from tidegate.testing.standin_openai import add_openai
from tidegate.testing.standin_replicate import add_replicate
from tidegate.testing.standin_studio import Control, Studio
from tidegate.testing.standin_wire import KnowsItsConnection


def build_app(studio: Studio) -> FastAPI:
    app = FastAPI(title="tidegate stand-in provider", openapi_url=None)
    jobs = Jobs(studio)

    @app.post("/control")
    async def control(order: Control) -> dict[str, Any]:
        if order.forget:
            jobs.forget()
        studio.control(order)
        return studio.stats()

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return studio.stats()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    add_openai(app, studio)
    add_fal(app, studio, jobs)
    add_replicate(app, studio, jobs)
    app.add_middleware(KnowsItsConnection)
    return app


def main(
    port: Annotated[int, typer.Option(help="On the loopback address.")],
    latency_s: Annotated[float, typer.Option(help="Seconds that one request takes; the median.")] = 0.2,
    latency_sigma: Annotated[float, typer.Option(help="Spread: of the log-normal's logarithm; 0 = none.")] = 0.0,
    slots: Annotated[int, typer.Option(help="Requests at a time; above it OpenAI's face answers 429.")] = 8,
    model: Annotated[str, typer.Option(help="The only model that OpenAI's face knows.")] = "stand-in-image",
    key: Annotated[str, typer.Option(help="The API key that callers must show; empty = none.")] = "",
) -> None:
    """Serve until SIGTERM."""
    app = build_app(Studio(model, latency_s, slots, latency_sigma, key))
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=1)


if __name__ == "__main__":
    typer.run(main)
