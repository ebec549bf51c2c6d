"""The gateway's addresses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route

import tidegate
from tidegate.serve.api import ApiError, ImagesBody
from tidegate.serve.door import Door, refusal
from tidegate.serve.job_runner import JobBody
from tidegate.serve.jobs import JobStatus

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"description": "OpenAI's error object", "content": {"application/json": {"schema": _ERROR}}}
}

_LIST = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    {"name": "after", "in": "query", "schema": {"type": "string"}},
    {"name": "status", "in": "query", "schema": {"type": "string", "enum": [*JobStatus]}},
]


def _takes(body: type[BaseModel]) -> dict[str, Any]:
    """For the specification only: routes read the body themselves, no further than its limit."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body.model_json_schema()}}}}


def build_api(door: Door) -> FastAPI:
    """OpenAI's images API before `door`."""
    api = FastAPI(title="tidegate", version=tidegate.__version__, docs_url=None, redoc_url=None)

    @api.exception_handler(ApiError)
    async def say_why(request: Request, error: ApiError) -> JSONResponse:
        return refusal(error)

    @api.exception_handler(HTTPException)
    async def say_no_such_route(request: Request, error: HTTPException) -> JSONResponse:
        refused = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
        return JSONResponse(refused.body(), status_code=error.status_code, headers=error.headers)

    @api.exception_handler(Exception)
    async def say_our_fault(request: Request, error: Exception) -> JSONResponse:
        # What it was stands in the log and the ledger: it may name things that are no client's business.
        return refusal(ApiError(500, "the gateway failed at this request; its log says why", code="internal_error"))

    @api.post("/v1/images/generations", openapi_extra=_takes(ImagesBody), responses=_ERRORS)
    async def generations(request: Request) -> Response:
        return await door.generate(request)

    @api.post("/v1/images/jobs", status_code=202, openapi_extra=_takes(JobBody), responses=_ERRORS)
    async def submit_job(request: Request) -> Response:
        return await door.submit_job(request)

    @api.get("/v1/images/jobs", openapi_extra={"parameters": _LIST}, responses=_ERRORS)
    async def list_jobs(request: Request) -> JSONResponse:
        return JSONResponse(await door.list_jobs(request))

    @api.get("/v1/images/jobs/{job}", responses=_ERRORS)
    async def fetch_job(request: Request, job: str) -> JSONResponse:
        return JSONResponse(await door.job(request, job))

    @api.post("/v1/images/jobs/{job}/cancel", responses=_ERRORS)
    async def cancel_job(request: Request, job: str) -> JSONResponse:
        return JSONResponse(await door.cancel_job(request, job))

    @api.get("/v1/models")
    async def models(request: Request) -> JSONResponse:
        return JSONResponse(door.models(request))

    @api.get("/v1/models/{name:path}", responses=_ERRORS)
    async def model(request: Request, name: str) -> JSONResponse:
        return JSONResponse(door.model(request, name))

    @api.get("/health")
    async def health() -> JSONResponse:
        """This process lives."""
        return JSONResponse({"status": "ok"})

    @api.get("/ready")
    async def ready() -> JSONResponse:
        return JSONResponse(door.ready())

    # In front of its like, which is left to describe it: FastAPI's wrapper would check nothing here, the door does all,
    # and is a sixth of a gateway's time.
    api.router.routes.insert(0, Route("/v1/images/generations", door.generate, methods=["POST"]))
    return api
