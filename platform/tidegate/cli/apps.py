"""Serve applications for `tidegate up --app FILE`: what runs as asked is left alone, the rest is deployed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from tidegate.errors import TidegateError
from tidegate.ids import NodeId, pool_name, pools_app

DEPLOYED_AT = "deployed_at_s"
"""The argument of the images application that makes Serve build it anew though nothing else has changed."""


class AppError(TidegateError):
    """An application's file is wrong, or it did not come up; the text says what Serve said."""


class Serve:
    """Serve as its dashboard shows it: the public way that `serve deploy` takes too."""

    def __init__(self, dashboard_url: str) -> None:
        if not dashboard_url:
            raise AppError("the cluster has no dashboard, and applications are deployed by it\nhint: start Ray with it")
        try:
            self._client = ServeSubmissionClient(dashboard_url)
        except (ConnectionError, RuntimeError) as error:
            raise AppError(
                f"the dashboard at {dashboard_url} does not answer: {error}\n"
                f"hint: from another machine it is seen only where cluster.dashboard_host lets it be"
            ) from None

    def apps(self) -> dict[str, dict[str, Any]]:
        """Name -> what Serve says of it; empty where Serve does not run."""
        try:
            apps: dict[str, dict[str, Any]] = self._client.get_serve_details().get("applications", {})
        except (OSError, RuntimeError) as error:
            raise AppError(f"the dashboard does not say what Serve runs: {error}") from None
        return apps

    def deploy(self, config: ServeDeploySchema) -> None:
        """Raises AppError when Serve refuses."""
        try:
            self._client.deploy_applications(config.model_dump(exclude_unset=True, mode="json"))
        except (OSError, RuntimeError) as error:
            raise AppError(f"Serve refuses the deployment: {error}") from None


def read_apps(files: Sequence[Path]) -> ServeDeploySchema:
    """The files as one deployment. What stands beside `applications` must not differ.

    Raises:
        AppError: with the file and the field.
    """
    merged: dict[str, Any] = {}
    for file in files:
        try:
            values = yaml.safe_load(file.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise AppError(f"{file}: must be a mapping as `serve deploy` takes it, got {type(values).__name__}")
            ServeDeploySchema.model_validate(values)
        except OSError as error:
            raise AppError(f"{file}: cannot be read: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise AppError(f"{file}: not YAML: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise AppError(f"{file}: {where}: {first['msg']}") from None
        for key, value in values.items():
            if key == "applications":
                merged.setdefault(key, []).extend(value)
            elif merged.setdefault(key, value) != value:
                raise AppError(
                    f"{file}: {key}: another file says {merged[key]!r}; Serve has it once for all applications"
                )
    try:
        return ServeDeploySchema.model_validate(merged)
    except ValidationError as error:
        raise AppError(f"{', '.join(map(str, files))}: {error.errors()[0]['msg']}") from None


def deploy(
    serve: Serve, wanted: ServeDeploySchema, *, anew_at_s: float | None = None, deadline_s: float
) -> Iterator[str]:
    """Deploy what does not run as asked, wait until all of it runs; yields each change.

    Applications that others have deployed stay: Serve would delete what a deployment does not name.

    Args:
        anew_at_s: now, to build the applications anew though nothing has changed: their gateways start again.

    Raises:
        AppError: Serve refuses, an application fails, or it does not run within `deadline_s`.
    """
    there = serve.apps()
    names = [app.name for app in wanted.applications]
    changed = []
    for app in wanted.applications:
        if anew_at_s is not None:
            app.args = {**app.args, DEPLOYED_AT: anew_at_s}
        running = there.get(app.name)
        if running is None or running.get("deployed_app_config") is None:
            changed.append(app.name)
        elif differs := _differs(running["deployed_app_config"], app, anew=anew_at_s is not None):
            changed.append(app.name)
            yield f"{app.name} runs with another {', another '.join(differs)}: deployed anew"
    if changed:
        others = [
            ServeApplicationSchema.model_validate(app["deployed_app_config"])
            for name, app in there.items()
            if name not in names and app.get("deployed_app_config") is not None
        ]
        kept = [
            # As it was built, so that Serve sees no change in what we don't mean to change.
            ServeApplicationSchema.model_validate(there[app.name]["deployed_app_config"])
            if app.name not in changed
            else app
            for app in wanted.applications
        ]
        serve.deploy(wanted.model_copy(update={"applications": [*kept, *others]}))
    yield from _wait(serve, names, deadline_s)


def await_pools(serve: Serve, app: str, nodes: Sequence[NodeId], deadline_s: float) -> Iterator[str]:
    """Until the arbiter has given each node its pool, and the pools run what they should; yields each change.

    Raises:
        AppError: not within `deadline_s`.
    """
    name = pools_app(app)

    def lacks(apps: dict[str, dict[str, Any]]) -> list[str]:
        pools = apps.get(name, {}).get("deployments", {})
        full = [pool for pool, row in pools.items() if _running(row) >= row["target_num_replicas"]]
        return sorted(set(map(pool_name, nodes)).difference(full))

    yield from _wait(serve, [name] if nodes else [], deadline_s, lacks)


def _wait(
    serve: Serve,
    names: Sequence[str],
    deadline_s: float,
    lacks: Callable[[dict[str, dict[str, Any]]], list[str]] = lambda apps: [],
) -> Iterator[str]:
    deadline = time.monotonic() + deadline_s
    said: dict[str, str] = {}
    while True:
        apps = serve.apps()
        for name in names:
            line = _line(name, apps.get(name))
            if said.get(name) != line:
                said[name] = line
                yield line
            if apps.get(name, {}).get("status") == "DEPLOY_FAILED":
                raise AppError(f"{name} did not come up: {apps[name].get('message') or 'Serve does not say why'}")
        if all(apps.get(name, {}).get("status") == "RUNNING" for name in names) and not lacks(apps):
            return
        if time.monotonic() > deadline:
            raise AppError(f"{', '.join(names)}: not running within {deadline_s:.0f} s\nhint: `serve status` says more")
        time.sleep(0.5)


def _line(name: str, app: dict[str, Any] | None) -> str:
    if app is None:
        return f"{name}: not there yet"
    replicas = [f"{deployment} {_running(row)}" for deployment, row in app["deployments"].items()]
    return f"{name}: {app['status'].lower()}" + (f" ({', '.join(replicas)})" if replicas else "")


def _running(deployment: dict[str, Any]) -> int:
    return sum(1 for replica in deployment["replicas"] if replica["state"] == "RUNNING")


def _differs(running: dict[str, Any], wanted: ServeApplicationSchema, *, anew: bool) -> list[str]:
    """The fields in which the two differ; when it was deployed is no difference."""
    old = ServeApplicationSchema.model_validate(running).model_dump(mode="json")
    new = wanted.model_dump(mode="json")
    if not anew:
        old["args"] = {key: value for key, value in old["args"].items() if key != DEPLOYED_AT}
    return [key for key in new if old.get(key) != new[key]]
