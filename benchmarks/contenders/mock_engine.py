"""An engine without a model behind OpenAI's images API: every request gets the same small picture at once.

    python -m benchmarks.contenders.mock_engine --port 7680

Nothing in Python can answer sooner, so it is the floor that every door is measured against.
"""

from __future__ import annotations

import argparse
import base64
import json
import time

import uvicorn
from benchmarks.contenders.light_apps import LightEngine
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send


def build() -> ASGIApp:
    picture = base64.b64encode(LightEngine(0.0).png).decode("ascii")
    body = json.dumps({"created": int(time.time()), "data": [{"b64_json": picture}]}).encode()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await Request(scope, receive).body()
            await Response(body, media_type="application/json")(scope, receive, send)

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    uvicorn.run(build(), host="127.0.0.1", port=port, log_level="warning", access_log=False, lifespan="off")


if __name__ == "__main__":
    main()
