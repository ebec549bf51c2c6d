"""The gateway's addresses."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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


_GENERATIONS = "/v1/images/generations"


class _Api(FastAPI):
    """Requests for pictures go straight to the door, which checks all by itself: FastAPI's layers would only describe
    them, and are a fifth of a gateway's time."""

    def __init__(self, door: Door) -> None:
        super().__init__(title="tidegate", version=tidegate.__version__, docs_url=None, redoc_url=None)
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("method") != "POST" or scope["path"] != scope.get("root_path", "") + _GENERATIONS:
            await super().__call__(scope, receive, send)
            return
        try:
            response = await self._door.generate(Request(scope, receive))
        except ApiError as error:
            response = refusal(error)
        except Exception:
            await our_fault()(scope, receive, send)
            raise  # Serve logs it
        await response(scope, receive, send)


def our_fault() -> JSONResponse:
    # What it was stands in the log and the ledger: it may name things that are no client's business.
    return refusal(ApiError(500, "the gateway failed at this request; its log says why", code="internal_error"))


def build_api(door: Door) -> FastAPI:
    """OpenAI's images API before `door`."""
    api = _Api(door)

    @api.exception_handler(ApiError)
    async def say_why(request: Request, error: ApiError) -> JSONResponse:
        return refusal(error)

    @api.exception_handler(HTTPException)
    async def say_no_such_route(request: Request, error: HTTPException) -> JSONResponse:
        refused = ApiError(error.status_code, f"{request.method} {request.url.path[:100]}: {error.detail}")
        return JSONResponse(refused.body(), status_code=error.status_code, headers=error.headers)

    @api.exception_handler(Exception)
    async def say_our_fault(request: Request, error: Exception) -> JSONResponse:
        return our_fault()

    @api.post(_GENERATIONS, openapi_extra=_takes(ImagesBody), responses=_ERRORS)
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

    return api
