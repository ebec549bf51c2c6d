"""The deployable application: its YAML is what Serve and `build` accept, and it says what it lacks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from tidegate.ids import NodeId, PoolName
from tidegate.serve.options import EngineOptions
from tidegate.serve.pools import images_plan, images_pool
from tidegate.serve.work import Size
from tidegate.spec.weights import RolloutSpec

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images() -> ModuleType:
    spec = importlib.util.spec_from_file_location("images_app", ROOT / "serve_apps" / "images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_yaml_is_what_serve_deploy_takes(images: ModuleType) -> None:
    config = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "serve_apps" / "images.yaml").read_text()))
    (app,) = config.applications
    assert not app.external_scaler_enabled, "it is the pools' that is scaled"
    assert app.import_path == "serve_apps.images:build"
    args = images.ImagesArgs.model_validate(app.args)
    assert (args.model, args.gateways) == ("tidegate-digits", 1)
    assert images.build.__annotations__["args"] is images.ImagesArgs  # a string here would hand `build` a plain dict


@pytest.mark.parametrize(
    ("share", "said"), [(0.6, "6 need 6 GPUs, not 4"), (0.4, "6 need 3 GPUs"), (2, "holds one replica")]
)
def test_shares_of_a_gpu_are_refused_with_the_numbers(images: ModuleType, share: float, said: str) -> None:
    """C034: six replicas of 0.6 GPU need six GPUs, not the four that their sum suggests."""
    with pytest.raises(ValueError, match=said):
        images.ImagesArgs(weights="w", gpus_per_replica=share)


def test_a_misspelt_argument_is_refused(images: ModuleType) -> None:
    """C023: a limit that is written where none is read is refused when the app is built."""
    with pytest.raises(ValueError, match="max_queued_requests"):
        images.ImagesArgs(weights="w", max_queued_requests=50)
    with pytest.raises(ValueError, match="gatewais"):
        images.ImagesArgs(weights="w", gatewais=2)


def test_a_plan_is_the_same_until_something_in_it_changes() -> None:
    """A gateway that starts anew must not make the arbiter build the pools anew."""
    options, rollout = EngineOptions(threads=3, sizes=(Size(16, 8),)), RolloutSpec(prompts=("a",), seed=3)
    args: dict[str, Any] = {
        "app": "images",
        "weights": "w",
        "options": options,
        "rollout": rollout,
        "requests_per_replica": 5,
    }
    args |= {"stuck_after_s": 60.0, "drain_s": 5.0}
    one, again = images_plan(**args, at_s=1.0), images_plan(**args, at_s=2.0)
    assert one.version == again.version
    for other in (
        {"weights": "v"},
        {"options": EngineOptions()},
        {"rollout": RolloutSpec()},
        {"requests_per_replica": 2},
    ):
        assert images_plan(**{**args, **other}, at_s=1.0).version != one.version
    pool = images_pool(NodeId("a" * 56), PoolName("pool-a"), one.args)._bound_deployment
    assert pool.ray_actor_options["label_selector"] == {"ray.io/node-id": "a" * 56}
    assert (pool.name, pool.init_args) == ("pool-a", ("images", "w", options, rollout, 60.0, 5))
    assert pool.max_ongoing_requests == 5


def test_building_imports_no_torch() -> None:
    code = "import sys; sys.path.insert(0, 'serve_apps'); import images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 0
