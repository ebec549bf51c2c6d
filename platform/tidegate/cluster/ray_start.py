"""How a node of the cluster is started: `policy.yaml`'s `cluster` as arguments of `ray start` and its environment.

The one place where these settings become Ray's: `tidegate up`, the local cluster of the tests and, by a test,
`cluster.yaml` all go by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.spec.policy import ClusterSpec

CURRENT_CLUSTER = "ray_current_cluster"
"""The file in Ray's temporary folder that holds the address of the cluster last started or joined from it."""

DEFAULT_TEMP_DIR = "/tmp/ray"
"""Ray's own, where the settings name none."""


HAND_OVER = {
    # A placement group that waits is looked at again after 0.1 s, then ever later: by default up to 1 s.
    "RAY_gcs_create_placement_group_retry_max_interval_ms": "100",
    # Serve's controller stops replicas in turns of its loop; its default is 0.1 s.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.05",
}
"""A claim's GPUs go from a replica to a placement group; these are the seconds that Ray adds to that."""

ROLE_LABEL = {"tidegate/role": "worker"}
"""Every node that joins has it, the head never: what must outlive the head is kept off it by this label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayStart:
    """What follows `ray start`, and what must stand in its environment (all that it starts inherits it)."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]


def head_start(spec: ClusterSpec, *, redis_password: str | None = None) -> RayStart:
    """The head: GCS, dashboard and the control plane, never a GPU's work.

    Args:
        redis_password: the value behind `spec.redis.password_env`.
    """
    arguments = [
        "--head",
        f"--port={spec.gcs_port}",
        "--include-dashboard=true",
        f"--dashboard-host={spec.dashboard_host}",
        f"--dashboard-port={spec.dashboard_port}",
        "--num-gpus=0",
        *_everywhere(spec),
    ]
    if redis_password is not None:
        arguments.append(f"--redis-password={redis_password}")
    return RayStart(arguments=tuple(arguments), environment=environment(spec))


def worker_start(spec: ClusterSpec, head: str, labels: Mapping[str, str]) -> RayStart:
    """A node that joins the head at `head` (host:port). Ray counts its GPUs itself.

    Args:
        labels: this node's own; they win over those that the settings give to every node.
    """
    labels = {**ROLE_LABEL, **spec.labels, **labels}
    listed = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    arguments = (f"--address={head}", *_everywhere(spec), f"--labels={listed}")
    return RayStart(arguments=arguments, environment=environment(spec))


def environment(spec: ClusterSpec) -> dict[str, str]:
    """The same on every node: Ray reads some of these in each of its processes."""
    values = {
        "RAY_health_check_initial_delay_ms": _ms(spec.health_check_period_s),
        "RAY_health_check_period_ms": _ms(spec.health_check_period_s),
        "RAY_health_check_timeout_ms": _ms(spec.health_check_timeout_s),
        "RAY_health_check_failure_threshold": str(spec.health_check_failures),
        "RAY_gcs_rpc_server_reconnect_timeout_s": f"{spec.head_away_s:.0f}",
        **HAND_OVER,
    }
    if spec.redis is not None:
        values["RAY_REDIS_ADDRESS"] = spec.redis.address
        values["RAY_external_storage_namespace"] = spec.redis.namespace
    if spec.haproxy:
        values |= _haproxy(spec)
    return values


def _everywhere(spec: ClusterSpec) -> list[str]:
    arguments = [f"--dashboard-agent-listen-port={spec.dashboard_agent_port}", "--disable-usage-stats"]
    if spec.metrics_port is not None:
        arguments.append(f"--metrics-export-port={spec.metrics_port}")
    if spec.temp_dir is not None:
        arguments.append(f"--temp-dir={spec.temp_dir}")
    return arguments


def _haproxy(spec: ClusterSpec) -> dict[str, str]:
    """Serve's HAProxy ingress, with replicas that run user code and router in one loop and speak gRPC."""
    values = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # The default of 4 MiB is less than one picture in full size.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
        # A gateway that leaves waits this long, busy or not; Ray's 30 s make each redeploy slow.
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(spec.haproxy_stats_port),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(spec.haproxy_metrics_port),
    }
    if spec.temp_dir is not None:
        folder = f"{spec.temp_dir}/haproxy"
        values |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
            "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin.sock",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics.sock",
        }
    return values


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}"
