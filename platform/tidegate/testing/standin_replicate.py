"""The stand-in's face that answers as Replicate's HTTP API does: predictions by model or version, cancel, files."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.testing.standin_fal import file_of
from tidegate.testing.standin_jobs import Job, Jobs, JobState
from tidegate.testing.standin_studio import Fault, Order, Studio
from tidegate.testing.standin_wire import MARK, Cut, Reset

MODEL, VERSION = "stand-in/image", "5c7d5dc6dd8bf75c1acaa8565735e7986bc5b66206b55cca93cb72c9bf15ccaa"


class Input(BaseModel):
    """As SDXL's own input on Replicate, as far as it is read."""

    model_config = ConfigDict(extra="ignore")

    prompt: str
    width: Annotated[int, Field(ge=1, le=9999)] = 1024
    height: Annotated[int, Field(ge=1, le=9999)] = 1024
    num_outputs: Annotated[int, Field(ge=1, le=10)] = 1
    seed: int | None = None


def add_replicate(app: FastAPI, studio: Studio, jobs: Jobs) -> None:
    @app.post("/replicate/v1/models/{owner}/{name}/predictions")
    async def predict_by_model(owner: str, name: str, request: Request) -> Response:
        known = f"{owner}/{name}" == MODEL
        return await submit(request, known, "The requested resource could not be found.", 404)

    @app.post("/replicate/v1/predictions")
    async def predict_by_version(request: Request) -> Response:
        known = (await request.json()).get("version") == VERSION
        return await submit(request, known, "The specified version does not exist.", 422)

    async def submit(request: Request, known: bool, unknown_why: str, unknown_status: int) -> Response:
        studio.counts["requests"] += 1
        if studio.key and request.headers.get("authorization") != f"Bearer {studio.key}":
            return _problem(studio, 401, "You did not pass a valid authentication token")
        if not known:
            return _problem(studio, unknown_status, unknown_why)
        if not studio.has_room():
            return _throttled(studio)
        fault = studio.next_fault()
        if fault is Fault.STATUS:
            return _problem(studio, studio.script.status, "scripted fault", studio.script.retry_after)
        if fault is Fault.RESET:
            return Reset()
        try:
            asked = Input.model_validate((await request.json()).get("input"))
        except ValidationError as error:
            return _problem(studio, 422, f"- input: {error.errors()[0]['msg']}\n")
        order = Order(
            prompt=asked.prompt,
            images=asked.num_outputs,
            width=asked.width,
            height=asked.height,
            seed=asked.seed,
            key=request.headers.get("idempotency-key"),
        )
        job = jobs.take(order, fault)
        if fault is Fault.DROP:
            return Cut()
        return JSONResponse(_prediction(studio, request, job), 201, headers=MARK)

    @app.get("/replicate/v1/predictions/{prediction_id}")
    async def get(prediction_id: str, request: Request) -> Response:
        studio.counts["polls"] += 1
        job = jobs.find(prediction_id)
        if job is None:
            return JSONResponse({"detail": "Not found", "status": 404}, 404, headers=MARK)
        return JSONResponse(_prediction(studio, request, job), headers=MARK)

    @app.post("/replicate/v1/predictions/{prediction_id}/cancel")
    async def cancel(prediction_id: str, request: Request) -> Response:
        job = jobs.find(prediction_id)
        if job is None:
            return JSONResponse({"detail": "Not found", "status": 404}, 404, headers=MARK)
        jobs.cancel(job)
        return JSONResponse(_prediction(studio, request, job), headers=MARK)

    @app.get("/replicate/files/{prediction_id}/{name}")
    async def picture(prediction_id: str, name: str) -> Response:
        return file_of(jobs.find(prediction_id), name)


_STATUS = {
    JobState.QUEUED: "starting",
    JobState.RUNNING: "processing",
    JobState.DONE: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "canceled",
}


def _prediction(studio: Studio, request: Request, job: Job) -> dict[str, Any]:
    base = str(request.base_url)
    files = [f"{studio.files_at or base}replicate/files/{job.id}/out-{i}.png" for i in range(len(job.pngs))]
    own = f"{base}replicate/v1/predictions/{job.id}"
    now = datetime.now(UTC).isoformat()
    return {
        "id": job.id,
        "model": MODEL,
        "version": VERSION,
        "input": {"prompt": job.order.prompt},
        "logs": "",
        "output": files if job.state is JobState.DONE else None,
        "error": job.why or None,
        "status": _STATUS[job.state],
        "created_at": now,
        "started_at": now if job.ever_ran else None,
        "completed_at": now if job.ended else None,
        "urls": {"get": own, "cancel": f"{own}/cancel"},
    }


def _throttled(studio: Studio) -> Response:
    studio.counts["refused"] += 1
    rest_s = math.ceil(studio.latency_s) or 1
    body = {"detail": f"Request was throttled. Expected available in {rest_s} second.", "status": 429}
    return JSONResponse(body, 429, headers={**MARK, "ratelimit-remaining": "0", "ratelimit-reset": str(rest_s)})


def _problem(studio: Studio, status: int, why: str, retry_after: str | None = None) -> Response:
    studio.counts["refused"] += 1
    headers = MARK if retry_after is None else {**MARK, "retry-after": retry_after}
    return JSONResponse({"detail": why, "status": status}, status_code=status, headers=headers)
