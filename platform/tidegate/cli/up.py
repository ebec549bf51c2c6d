"""`tidegate up` and `tidegate down`: Ray on this machine, the control plane on the cluster, applications on Serve."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from tidegate.arbiter.actor import start_arbiter
from tidegate.arbiter.client import ACTOR_NAME, NAMESPACE
from tidegate.arbiter.states import ENDED
from tidegate.cli.apps import Serve, await_pools, deploy, read_apps
from tidegate.cli.connect import connect
from tidegate.cluster.node import ThisMachine, head_address
from tidegate.errors import TidegateError
from tidegate.health.on_ray import KEEPER_NAME, gpu_nodes, keep_agents, start_agents
from tidegate.health.rules import rules_of
from tidegate.ids import health_agent_name, pools_app
from tidegate.spec.load import load_policy
from tidegate.spec.policy import Policy

START_DEADLINE_S = 60.0
APPS_DEADLINE_S = 600.0

HOW_TO_APPLY = {
    "cluster": "`tidegate down` and `tidegate up` on each machine",
    "serving": "`tidegate up --apply`, and deploy the applications again for their gateways",
    "providers": "`tidegate up --apply`, and deploy the applications again for their gateways",
}
"""By the first part of a setting's path; all others need `--apply` alone."""


class StartError(TidegateError):
    """A part of the control plane did not come up."""


class StillClaimedError(TidegateError):
    """The control plane can't be taken down: runs hold GPUs by it."""

    def __init__(self, claims: tuple[str, ...]) -> None:
        super().__init__(claims)
        self.claims = claims

    def __str__(self) -> str:
        return (
            f"claims stand: {', '.join(self.claims)}\n"
            f"hint: stop their jobs (`ray job stop`) or `tidegate release` them first"
        )


def own_head(policy_path: Path) -> str:
    """The address of a head that is started here. Raises PolicyError."""
    return head_address(load_policy(policy_path).cluster)


def start_head_here(policy_path: Path) -> Iterator[str]:
    """Raises PolicyError, PortInUseError, NodeStartError: see there."""
    policy = load_policy(policy_path)
    yield from _machine(policy).start_head(policy.cluster)


def join_here(policy_path: Path, head: str, labels: Sequence[str], gpus: int | None) -> Iterator[str]:
    """Raises PolicyError, PortInUseError, NodeStartError: see there."""
    policy = load_policy(policy_path)
    yield from _machine(policy).start_worker(policy.cluster, head, _labels(labels), gpus)


def bring_up(
    policy_path: Path, address: str, *, apps: Sequence[Path] = (), apply: bool = False, redeploy: bool = False
) -> Iterator[str]:
    """Start what does not run yet on the cluster at `address`; yields a line for each part.

    Args:
        apply: where the control plane runs with other settings, start it anew with these.
        redeploy: start the gateways of `apps` anew, though nothing has changed.

    Raises:
        PolicyError, AppError: see there. Files are checked before anything is started.
        StartError: a part did not answer in time.
    """
    policy = load_policy(policy_path)
    rules_of(policy.health)
    wanted = read_apps(apps) if apps else None
    dashboard_url = connect(address)
    try:
        yield from _control_plane(policy, policy_path, apply=apply)
        if wanted is not None:
            serve = Serve(dashboard_url)
            anew_at_s = time.time() if redeploy else None
            yield from deploy(serve, wanted, anew_at_s=anew_at_s, deadline_s=APPS_DEADLINE_S)
            if policy.serving.app in [app.name for app in wanted.applications]:
                yield from await_pools(serve, policy.serving.app, sorted(gpu_nodes()), APPS_DEADLINE_S)
    finally:
        ray.shutdown()


def stop_here(policy_path: Path) -> Iterator[str]:
    """End the Ray nodes that `up` has started on this machine. Raises NodeStartError."""
    yield from _machine(load_policy(policy_path)).stop()


def take_down(policy_path: Path, address: str) -> Iterator[str]:
    """Take our actors and the serving application off the cluster at `address`; Ray stays.

    Raises:
        StillClaimedError: runs hold GPUs.
    """
    from ray import serve

    policy = load_policy(policy_path)
    connect(address)
    try:
        arbiter = _actor(ACTOR_NAME)
        if arbiter is not None:
            status = ray.get(arbiter.status.remote(), timeout=START_DEADLINE_S)
            standing = tuple(row["claim"] for row in status["claims"] if row["state"] not in ENDED)
            if standing:
                raise StillClaimedError(standing)
        agents = [health_agent_name(node) for node in sorted(gpu_nodes())]
        # The keeper first, or it would start the agents again.
        ended = sum(_kill(name) for name in (KEEPER_NAME, *agents, ACTOR_NAME))
        yield f"{ended} actors of the control plane are ended" if ended else "no control plane runs"
        # After the arbiter, or it would build the pools again.
        there = serve.status().applications if _actor("SERVE_CONTROLLER_ACTOR", "serve") is not None else {}
        for app in (policy.serving.app, pools_app(policy.serving.app)):
            if app in there:
                serve.delete(app)
                yield f"{app} is taken down"
    finally:
        ray.shutdown()


def differing(old: Policy, new: Policy) -> list[str]:
    """Paths of the settings in which the two differ, as they stand in `policy.yaml`."""
    return sorted(_differing(old.model_dump(), new.model_dump()))


def _control_plane(policy: Policy, policy_path: Path, *, apply: bool) -> Iterator[str]:
    ran = _actor(ACTOR_NAME) is not None
    running = _policy_of(start_arbiter(policy))
    if running == policy:
        yield "arbiter runs already" if ran else "arbiter runs"
    else:
        paths = differing(running, policy)
        yield f"warning: the arbiter runs with other settings than {policy_path}: {', '.join(paths)}"
        if apply:
            for name in (KEEPER_NAME, *(health_agent_name(node) for node in gpu_nodes()), ACTOR_NAME):
                _kill(name)
            _policy_of(start_arbiter(policy))
            yield "arbiter and health agents are started anew; claims stand in its journal and go on"
        for part in sorted({path.partition(".")[0] for path in paths}):
            how = HOW_TO_APPLY.get(part, "`tidegate up --apply`")
            if not (apply and how == "`tidegate up --apply`"):
                yield f"hint: to apply {part}: {how}"
        if not apply:
            policy = running  # agents go by the arbiter's settings, not by ones that it does not know
    keeper = keep_agents(policy)
    count = start_agents(policy)
    try:
        ray.get(keeper.agents.remote(), timeout=START_DEADLINE_S)
    except ray.exceptions.RayError as error:
        raise StartError(f"the health agents' keeper did not answer within {START_DEADLINE_S:.0f} s: {error}") from None
    yield f"{count} health agents run; nodes that join later get theirs"


def _policy_of(arbiter: Any) -> Policy:
    try:
        policy: Policy = ray.get(arbiter.policy.remote(), timeout=START_DEADLINE_S)
    except ray.exceptions.RayError as error:
        raise StartError(f"the arbiter did not answer within {START_DEADLINE_S:.0f} s: {error}") from None
    return policy


def _actor(name: str, namespace: str = NAMESPACE) -> Any:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _kill(name: str) -> bool:
    actor = _actor(name)
    if actor is not None:
        ray.kill(actor)
    return actor is not None


def _differing(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from _differing(a, b, f"{path}{key}.")
        elif a != b:
            yield f"{path}{key}"


def _machine(policy: Policy) -> ThisMachine:
    return ThisMachine(policy.arbiter.state_path / "ray")


def _labels(labels: Sequence[str]) -> dict[str, str]:
    parsed = {}
    for label in labels:
        key, equals, value = label.partition("=")
        if not (key and equals and value):
            raise StartError(f"--label {label!r} is not KEY=VALUE\nhint: --label tidegate/domain=rack-7")
        parsed[key] = value
    return parsed
