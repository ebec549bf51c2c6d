"""The stand-in's face that answers as fal's queue does (fal docs, Queue API): submit, status, result, cancel, files."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tidegate.testing.standin_jobs import Job, Jobs, JobState
from tidegate.testing.standin_studio import Fault, Order, Studio
from tidegate.testing.standin_wire import MARK, Cut, Drip, Reset

OWNER, APP = "stand-in", "image"
"""The model's ID is `stand-in/image`; with a path behind it (`stand-in/image/fast`) the job's URLs leave that out."""

_NAMED_SIZES = {"square_hd": (1024, 1024), "square": (512, 512)}


class ImageSize(BaseModel):
    width: Annotated[int, Field(ge=1, le=9999)]
    height: Annotated[int, Field(ge=1, le=9999)]


class Asked(BaseModel):
    """The input of fal's text-to-image models, as far as it is read."""

    model_config = ConfigDict(extra="ignore")

    prompt: str
    image_size: ImageSize | str = "square_hd"
    num_images: Annotated[int, Field(ge=1, le=10)] = 1
    seed: int | None = None
    output_format: Annotated[str, Field(pattern="^png$")] = "png"


def add_fal(app: FastAPI, studio: Studio, jobs: Jobs) -> None:
    @app.post("/fal/{model:path}")
    async def submit(model: str, request: Request) -> Response:
        studio.counts["requests"] += 1
        refused = _unknown(studio, request)
        if refused is not None:
            return refused
        if model.split("/")[:2] != [OWNER, APP]:
            return _detail(studio, 404, f"Application '{model}' not found")
        if not studio.has_room():
            return _detail(studio, 429, "queue is full", "1")
        fault = studio.next_fault()
        if fault is Fault.STATUS:
            return _detail(studio, studio.script.status, "scripted fault", studio.script.retry_after)
        if fault is Fault.RESET:
            return Reset()
        job = _take(jobs, await request.json(), request.headers.get("idempotency-key"), fault)
        if fault is Fault.DROP:
            return Cut()
        return JSONResponse({"status": "IN_QUEUE", "queue_position": 0, **_urls(request, job)}, headers=MARK)

    @app.get("/fal/stand-in/image/requests/{request_id}/status")
    async def status(request_id: str, request: Request) -> Response:
        studio.counts["polls"] += 1
        job = jobs.find(request_id)
        if job is None or job.state is JobState.CANCELLED:
            return JSONResponse({"detail": "Request not found"}, 404, headers=MARK)
        if job.state is JobState.QUEUED:
            return JSONResponse({"status": "IN_QUEUE", "queue_position": 0, **_urls(request, job)}, 202, headers=MARK)
        if job.state is JobState.RUNNING:
            return JSONResponse({"status": "IN_PROGRESS", **_urls(request, job)}, 202, headers=MARK)
        failed = {"error": job.why, "error_type": "runner_error"} if job.state is JobState.FAILED else {}
        return JSONResponse({"status": "COMPLETED", **failed, **_urls(request, job)}, headers=MARK)

    @app.get("/fal/stand-in/image/requests/{request_id}")
    async def result(request_id: str, request: Request) -> Response:
        job = jobs.find(request_id)
        if job is None or job.state is JobState.CANCELLED:
            return JSONResponse({"detail": "Request not found"}, 404, headers=MARK)
        if not job.ended:
            return JSONResponse({"detail": "Request is still in progress"}, 400, headers=MARK)
        if job.state is JobState.FAILED:
            # An input that the model can't read is told here, not at the submission.
            bad_input = job.fault is None
            problem = {"loc": ["body"], "msg": job.why, "type": "value_error" if bad_input else "internal_error"}
            return JSONResponse({"detail": [problem]}, 422 if bad_input else 500, headers=MARK)
        base = studio.files_at or str(request.base_url)
        images = [
            {"url": f"{base}fal/files/{job.id}/{i}.png", "content_type": "image/png"} for i in range(len(job.pngs))
        ]
        seed = job.order.seed
        return JSONResponse({"images": images, "timings": {}, "seed": seed, "prompt": job.order.prompt}, headers=MARK)

    @app.put("/fal/stand-in/image/requests/{request_id}/cancel")
    async def cancel(request_id: str) -> Response:
        job = jobs.find(request_id)
        if job is None:
            return JSONResponse({"status": "NOT_FOUND"}, 404, headers=MARK)
        if job.ended:
            return JSONResponse({"status": "ALREADY_COMPLETED"}, 400, headers=MARK)
        jobs.cancel(job)
        if job.ever_ran:
            return JSONResponse({"status": "CANCELLATION_REQUESTED"}, 202, headers=MARK)
        return JSONResponse({"status": "OK"}, headers=MARK)

    @app.get("/fal/files/{request_id}/{name}")
    async def picture(request_id: str, name: str) -> Response:
        return file_of(jobs.find(request_id), name)

    def _unknown(studio: Studio, request: Request) -> Response | None:
        if studio.key and request.headers.get("authorization") != f"Key {studio.key}":
            return _detail(studio, 401, "Cannot access application. Authentication is required")
        return None


def file_of(job: Job | None, name: str) -> Response:
    """One of a job's pictures, as the services' file hosts give it: without a key."""
    index = int(name.removeprefix("out-").removesuffix(".png"))
    if job is None or index >= len(job.pngs):
        return Response(status_code=404)
    if job.fault is Fault.DRIP:
        return Drip(job.pngs[index], headers=MARK, media_type="image/png")
    return Response(job.pngs[index], headers=MARK, media_type="image/png")


def _take(jobs: Jobs, raw: Any, key: str | None, fault: Fault | None) -> Job:
    try:
        asked = Asked.model_validate(raw)
        size = asked.image_size
        width, height = _NAMED_SIZES[size] if isinstance(size, str) else (size.width, size.height)
    except (ValidationError, KeyError) as error:
        nothing = Order(prompt="", images=1, width=1, height=1, seed=None, key=key)
        return jobs.refuse_later(nothing, f"input can't be read: {error}"[:200])
    order = Order(prompt=asked.prompt, images=asked.num_images, width=width, height=height, seed=asked.seed, key=key)
    return jobs.take(order, fault)


def _urls(request: Request, job: Job) -> dict[str, str]:
    own = f"{request.base_url}fal/{OWNER}/{APP}/requests/{job.id}"
    return {
        "request_id": job.id,
        "response_url": own,
        "status_url": f"{own}/status",
        "cancel_url": f"{own}/cancel",
    }


def _detail(studio: Studio, status: int, why: str, retry_after: str | None = None) -> Response:
    studio.counts["refused"] += 1
    headers = MARK if retry_after is None else {**MARK, "retry-after": retry_after}
    return JSONResponse({"detail": why}, status_code=status, headers=headers)
