"""What `tidegate up` takes for the same, and what for changed; no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tidegate.cli.apps import AppError, Serve, await_pools, deploy, read_apps
from tidegate.cli.up import differing
from tidegate.ids import NodeId, pool_name
from tidegate.spec.load import parse_model
from tidegate.spec.policy import Policy

APP = {"name": "images", "import_path": "a:build", "args": {"weights": "w"}, "external_scaler_enabled": True}


class ServeInMemory(Serve):
    """Applications run as soon as they are deployed; what was asked for is kept."""

    def __init__(self, *running: dict[str, Any]) -> None:
        self.deployed: list[list[dict[str, Any]]] = []
        self._apps = {app["name"]: running_app(app) for app in running}

    def apps(self) -> dict[str, dict[str, Any]]:
        return self._apps

    def deploy(self, config: ServeDeploySchema) -> None:
        asked = config.model_dump(exclude_unset=True, mode="json")["applications"]
        self.deployed.append(asked)
        self._apps = {app["name"]: running_app(app) for app in asked}


def running_app(app: dict[str, Any]) -> dict[str, Any]:
    return {"status": "RUNNING", "deployed_app_config": app, "deployments": {}, "message": ""}


def up(serve: Serve, app: dict[str, Any], anew_at_s: float | None = None) -> Iterator[str]:
    return deploy(serve, ServeDeploySchema.model_validate({"applications": [app]}), anew_at_s=anew_at_s, deadline_s=5.0)


def test_an_app_that_runs_as_asked_is_left_alone() -> None:
    """C012: no deployment, so no replica restarts and no count falls back."""
    serve = ServeInMemory(APP)
    assert list(up(serve, APP)) == ["images: running"]
    assert serve.deployed == []


def test_a_changed_app_is_deployed_and_what_others_deployed_stays() -> None:
    other = {"name": "theirs", "import_path": "b:app", "route_prefix": "/theirs"}
    serve = ServeInMemory(APP, other)
    said = list(up(serve, {**APP, "args": {"weights": "v"}}))
    assert said == ["images runs with another args: deployed anew", "images: running"]
    ((images, theirs),) = serve.deployed
    assert (images["args"], theirs) == ({"weights": "v"}, other)


def test_what_runs_as_asked_is_built_anew_only_when_asked_for() -> None:
    serve = ServeInMemory(APP)
    list(up(serve, APP, anew_at_s=5.0))
    assert serve.deployed[0][0]["args"]["deployed_at_s"] == 5.0
    list(up(serve, APP))  # the file does not say when: no reason to build again
    assert len(serve.deployed) == 1


def test_up_waits_for_the_pool_of_each_node() -> None:
    serve, node = ServeInMemory(APP), NodeId("d" * 56)
    assert list(await_pools(serve, "images", [], deadline_s=0.0)) == []
    with pytest.raises(AppError, match="images-pools: not running"):
        list(await_pools(serve, "images", [node], deadline_s=0.0))
    serve.apps()["images-pools"] = {**running_app(APP), "deployments": {pool_name(node): pool_row(1, of=2)}}
    with pytest.raises(AppError, match="not running"):
        list(await_pools(serve, "images", [node], deadline_s=0.0))
    serve.apps()["images-pools"]["deployments"] = {pool_name(node): pool_row(2, of=2)}
    assert list(await_pools(serve, "images", [node], deadline_s=0.0)) == [
        f"images-pools: running ({pool_name(node)} 2)"
    ]


def pool_row(running: int, *, of: int) -> dict[str, Any]:
    return {"target_num_replicas": of, "replicas": [{"state": "RUNNING"}] * running}


def test_a_failed_deployment_says_what_serve_says() -> None:
    serve = ServeInMemory(APP)
    serve.apps()["images"] |= {"status": "DEPLOY_FAILED", "message": "no module named a"}
    with pytest.raises(AppError, match="images did not come up: no module named a"):
        list(up(serve, APP))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("applications: [{name: x}]", "import_path"),
        ("applications: [", "not YAML"),
        ("- a list", "mapping"),
    ],
)
def test_a_wrong_file_names_itself_and_the_field(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(text)
    with pytest.raises(AppError) as error:
        read_apps([file])
    assert str(file) in str(error.value)
    assert said in str(error.value)


def test_two_files_are_one_deployment_unless_they_contradict(tmp_path: Path) -> None:
    for name, port in (("a", 8000), ("b", 8000), ("c", 9000)):
        app = {"name": name, "import_path": f"{name}:app", "route_prefix": f"/{name}"}
        (tmp_path / name).write_text(yaml.safe_dump({"http_options": {"port": port}, "applications": [app]}))
    both = read_apps([tmp_path / "a", tmp_path / "b"])
    assert [app.name for app in both.applications] == ["a", "b"]
    with pytest.raises(AppError, match="http_options: another file says"):
        read_apps([tmp_path / "a", tmp_path / "c"])


def test_changed_settings_are_named_by_their_path() -> None:
    old, new = Policy(), parse_model("health: {temperature: {limit_celsius: 80}}\nserving: {patience_s: 3}", Policy)
    assert differing(old, new) == ["health.temperature.limit_celsius", "serving.patience_s"]
    assert differing(old, old) == []
