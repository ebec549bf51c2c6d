"""From `policy.yaml` to `ray start`: one function, and the launcher's file says the same."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tidegate.cluster.ray_start import environment, head_start, worker_start
from tidegate.errors import PolicyError
from tidegate.spec.load import load_policy, parse_model
from tidegate.spec.policy import ClusterSpec, Policy, RedisSpec

ROOT = Path(__file__).parents[2]


def as_mapping(arguments: tuple[str, ...]) -> dict[str, str]:
    return {name: value for name, _, value in (argument.partition("=") for argument in arguments)}


def test_a_head_never_offers_gpus_and_a_worker_brings_its_labels() -> None:
    spec = ClusterSpec(gcs_port=7000, temp_dir="/tmp/x", labels={"tidegate/domain": "rack-1", "gpu": "h200"})
    head = as_mapping(head_start(spec).arguments)
    assert (head["--port"], head["--num-gpus"], head["--temp-dir"]) == ("7000", "0", "/tmp/x")
    worker = as_mapping(worker_start(spec, "head:7000", {"tidegate/domain": "rack-2"}).arguments)
    assert worker["--address"] == "head:7000"
    assert worker["--labels"] == "gpu=h200,tidegate/domain=rack-2,tidegate/role=worker"
    assert "--num-gpus" not in worker
    assert head_start(spec).environment == worker_start(spec, "head:7000", {}).environment


def test_a_frozen_node_is_noticed_within_ten_seconds() -> None:
    values = environment(ClusterSpec())
    period, timeout = (int(values[f"RAY_health_check_{name}_ms"]) for name in ("period", "timeout"))
    assert (period + timeout) * int(values["RAY_health_check_failure_threshold"]) < 10_000


def test_redis_and_its_password() -> None:
    assert "RAY_REDIS_ADDRESS" not in environment(ClusterSpec())
    spec = ClusterSpec(redis=RedisSpec(address="redis-host:6380", namespace="blue"))
    values = environment(spec)
    assert (values["RAY_REDIS_ADDRESS"], values["RAY_external_storage_namespace"]) == ("redis-host:6380", "blue")
    assert as_mapping(head_start(spec, redis_password="s3").arguments)["--redis-password"] == "s3"


def test_haproxy_is_an_environment_of_every_process() -> None:
    assert not any("HA_PROXY" in name for name in environment(ClusterSpec()))
    values = environment(ClusterSpec(haproxy=True, temp_dir="/tmp/x"))
    assert values["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert values["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"].startswith("/tmp/x/")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cluster: {gcs_port: 12000}", "gcs_port 12000 lies among the ports of Ray's workers"),
        ("cluster: {gcs_port: 8265}", "dashboard_port and gcs_port are both 8265"),
        ("cluster: {redis: {address: localhost}}", "cluster.redis.address"),
        ("cluster: {temp_dir: /" + 50 * "x" + "}", "temp_dir must be absolute and have 40 characters at most"),
        ("cluster: {health_check_period_ms: 100}", "`health_check_period_s`, in seconds"),
        ("cluster: {gcs_port: 70000}", "cluster.gcs_port"),
    ],
)
def test_bad_settings_name_the_field(text: str, said: str) -> None:
    with pytest.raises(PolicyError) as error:
        parse_model(text, Policy)
    assert said in str(error.value)


# cluster.yaml


def launcher_file() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    return values


def command_of(commands: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment and arguments of the one command among these that starts Ray."""
    (line,) = [command for command in commands if "ray start" in command]
    exported, *_, start = line.split(";")
    words = shlex.split(start)
    values = dict(word.split("=", 1) for word in shlex.split(exported)[1:])
    return values, tuple(words[words.index("start") + 1 :])


def test_rays_own_loader_takes_the_launcher_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = prepare_config(launcher_file())
    validate_config(config)
    (node_type,) = config["available_node_types"].values()
    workers = len(config["provider"]["worker_ips"])
    assert (node_type["min_workers"], config["max_workers"]) == (workers, workers)
    for local in config["file_mounts"].values():
        assert os.path.exists(local)


def test_the_launcher_file_starts_ray_as_tidegate_up_does() -> None:
    spec = load_policy(ROOT / "policy.yaml").cluster
    file = launcher_file()

    values, arguments = command_of(file["head_start_ray_commands"])
    head = head_start(spec)
    assert values == head.environment
    # The launcher's monitor, which `tidegate up` has no use for, reads this one.
    assert set(arguments) == {*head.arguments, "--autoscaling-config=~/ray_bootstrap_config.yaml"}

    values, arguments = command_of(file["worker_start_ray_commands"])
    worker = worker_start(spec, "$RAY_HEAD_IP:6379", {"tidegate/domain": "rack-1"})
    assert values == worker.environment
    assert set(arguments) == set(worker.arguments)
