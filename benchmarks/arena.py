"""Where contenders meet: a local cluster with logical GPUs, and the control plane on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tidegate.cli.up import bring_up
from tidegate.testing import fake_nvml
from tidegate.testing.local_cluster import LocalCluster, Ports

ROOT = Path(__file__).parents[1]
_PATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
"""The cluster's processes import the benchmarks from the root, and all else from where this process does."""


def fake_gpus(folder: Path, nodes: Sequence[str], gpus_per_node: int) -> list[dict[str, str]]:
    """Make an NVML library in `folder` and a healthy state for each node; returns each node's environment."""
    fake_nvml.build(folder)
    for node in nodes:
        fake_nvml.NvmlState(folder / f"{node}.state", fake_nvml.gpus_of(node, gpus_per_node))
    return [{fake_nvml.STATE_VARIABLE: str(folder / f"{node}.state")} for node in nodes]


def cluster(
    base_port: int,
    gpus_per_node: Sequence[int],
    node_environment: Sequence[Mapping[str, str]],
    *,
    haproxy: bool = False,
) -> LocalCluster:
    """`base_port` and the one after it are used."""
    return LocalCluster(
        ports=Ports(gcs=base_port, dashboard=base_port + 1),
        gpus_per_node=tuple(gpus_per_node),
        # Ray keeps an idle worker for each CPU: more of them only cost memory here.
        head_cpus=2,
        node_cpus=4,
        environment={"PYTHONPATH": _PATH, "OMP_NUM_THREADS": "1"},
        node_environment=node_environment,
        haproxy=haproxy,
    )


def write_policy(folder: Path, **changes: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> Path:
    """The repository's `policy.yaml` with its state in `folder`, the fake GPUs of `folder/nvml`, and `changes` to its
    parts."""
    policy = yaml.safe_load((ROOT / "policy.yaml").read_text(encoding="utf-8"))
    policy["arbiter"]["state_dir"] = str(folder / "state")
    policy["health"] |= {"nvml_library": str(folder / "nvml" / fake_nvml.LIBRARY), "state_dir": str(folder / "health")}
    for part, change in changes.items():
        policy[part] = {**policy[part], **change} if isinstance(change, Mapping) else list(change)
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump(policy), encoding="utf-8")
    return path


def start_control_plane(policy: Path, address: str) -> None:
    for line in bring_up(policy, address):
        print(line, flush=True)
