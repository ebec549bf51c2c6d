"""The peer: the same loop under plain Ray Train, one worker a rank, restarted by Ray Train alone.

It never reports to Ray Train: the loop's own checkpoints say where to go on, so only the restart differs from ours.
"""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
from benchmarks.contenders import peer_rank
from ray.train import FailureConfig, ScalingConfig
from ray.train.backend import Backend
from ray.train.torch import TorchConfig, TorchTrainer

from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig


class MeetingPoint(Backend):
    """What Ray's own torch backend does, but for `init_process_group`: the loop makes its groups itself, and meeting
    twice would cost the peer a second."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, address_and_port)
        worker_group.execute(set_environment, MASTER_ADDR=address, MASTER_PORT=str(port))


@dataclass
class MeetingPointConfig(TorchConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return MeetingPoint


def address_and_port() -> tuple[str, int]:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return ray.util.get_node_ip_address(), probe.getsockname()[1]


def set_environment(**values: str) -> None:
    os.environ.update(values)


def train(settings: dict[str, Any]) -> None:
    """Ray Train's `train_loop_per_worker`: one rank."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    set_environment(RANK=str(rank), WORLD_SIZE=str(context.get_world_size()), LOCAL_RANK=str(context.get_local_rank()))
    node = ray.get_runtime_context().get_node_id()
    peer_rank.train(settings["config"], Path(settings["data"]), Path(settings["run_dir"]), rank, node)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    arguments = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    TorchTrainer(
        train,
        train_loop_config={
            "config": load_model(arguments.config, RunConfig),
            "data": str(arguments.data),
            "run_dir": str(arguments.run_dir),
        },
        torch_config=MeetingPointConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=arguments.ranks, use_gpu=True),
        run_config=ray.train.RunConfig(
            name="peer",
            storage_path=str(arguments.run_dir / "ray_train"),
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()


if __name__ == "__main__":
    main()
