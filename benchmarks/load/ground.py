"""The ground that the story is played on: a local cluster that serves light pictures, and a provider for overflow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import ray
from benchmarks.contenders.light_apps import MODEL
from benchmarks.load.story import Provider, Story, wait_for

from benchmarks import arena
from tidegate.cli.connect import connect
from tidegate.testing.local_cluster import LocalCluster

NODES = ("node-a", "node-b")
GPUS_PER_NODE = 2
REPLICAS = len(NODES) * GPUS_PER_NODE
SLOTS = 16
"""Of the provider."""


@contextlib.contextmanager
def ground(folder: Path, base_port: int, story: Story, *, service_s: float, haproxy: bool) -> Iterator[str]:
    """The address of the gateway, when all replicas serve; this process is a driver of the cluster meanwhile.
    `base_port` and the two after it are used. The provider is the story's, and is up."""
    url = f"http://127.0.0.1:{base_port + 2}"
    environment = arena.fake_gpus(folder / "nvml", NODES, GPUS_PER_NODE)
    with arena.cluster(base_port, (GPUS_PER_NODE,) * len(NODES), environment, haproxy=haproxy) as cluster:
        policy = _write_policy(folder, story.provider)
        arena.start_control_plane(policy, cluster.address)
        connect(cluster.address)
        try:
            _deploy(cluster, base_port + 2, policy, service_s)
            wait_for(story.home, f"{story.replicas} replicas run")
            wait_for(lambda: _ready(url), "the gateway is ready")
            yield url
        finally:
            ray.shutdown()


def _write_policy(folder: Path, provider: Provider) -> Path:
    way_out = {
        "name": "stand-in",
        "base_url": f"{provider.url}/v1",
        "models": {MODEL: "stand-in-image"},
        "price_per_image_usd": 0.01,
        "slots": SLOTS,
        "timeout_s": 10.0,
        "cooldown_s": 1.0,
    }
    serving = {"patience_s": 2.0, "request_deadline_s": 60.0, "return_dwell_s": 0.5}
    # GPUs that came home would stay for a while, and the next claim would wait for that.
    return arena.write_policy(folder, serving=serving, claims={"dwell_s": 0.0}, providers=[way_out])


def _deploy(cluster: LocalCluster, http_port: int, policy: Path, service_s: float) -> None:
    images = {
        "name": "images",
        "route_prefix": "/",
        "import_path": "benchmarks.contenders.light_apps:images",
        "external_scaler_enabled": True,
        "args": {"policy": str(policy), "service_s": service_s},
    }
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "applications": [images],
    }
    url = f"{cluster.dashboard_url}/api/serve/applications/"
    httpx.put(url, json=config, timeout=60.0).raise_for_status()


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2.0).status_code == 200
    except httpx.HTTPError:
        return False
