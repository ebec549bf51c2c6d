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
    assert app.external_scaler_enabled
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


def node(name: str, *, gpus: int, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Alive": alive, "Resources": {"CPU": 4.0} | ({"GPU": float(gpus)} if gpus else {})}


def test_only_live_nodes_with_gpus_hold_pools(images: ModuleType) -> None:
    nodes = [node("b", gpus=2), node("head", gpus=0), node("a", gpus=8), node("dead", gpus=8, alive=False)]
    assert images.gpu_nodes(nodes) == ["a", "b"]
    with pytest.raises(RuntimeError, match="no live node has a GPU"):
        images.gpu_nodes([node("head", gpus=0), node("dead", gpus=8, alive=False)])


def test_building_imports_no_torch() -> None:
    code = "import sys; sys.path.insert(0, 'serve_apps'); import images; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 0
