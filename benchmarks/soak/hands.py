"""Does a fault to the cluster, takes it back where it lasts, and says when the cluster has got over it."""

from __future__ import annotations

import os
import signal
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, assert_never

from benchmarks.soak.faults import Fault, Kind

from tidegate.cli.demo.looking import Look
from tidegate.cli.demo.stage import GPUS_PER_NODE, Stage, WaitedTooLongError
from tidegate.testing.local_cluster import marked_processes

HOT_CELSIUS, WELL_CELSIUS = 84, 61
AT_WORK = ("running", "recomputing")
"""Phases of a gang whose ranks make steps."""


@dataclass(slots=True, kw_only=True)
class Inflicted:
    """A fault that has happened."""

    what: str
    at_s: float
    healed: Callable[[Look], bool]
    """Whether the cluster has got over it, by a look at it."""
    take_back: Callable[[], None] | None = None
    """Ends what lasts; called when the cluster has got over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """GPUs that were not there."""

    gpus: int
    begin_s: float
    end_s: float


@dataclass(slots=True, kw_only=True)
class Hands:
    stage: Stage
    ranks: int
    """Of the whole gang."""
    outages: list[Outage] = field(default_factory=list)

    def inflict(self, fault: Fault, now: Look) -> Inflicted:
        """Do it. `now` is a look at the cluster in which the gang is at work."""
        match fault.kind:
            case Kind.RANK_KILL:
                return self._signal_rank(fault, now, signal.SIGKILL)
            case Kind.RANK_STOP:
                return self._signal_rank(fault, now, signal.SIGSTOP)
            case Kind.NODE_KILL:
                return self._kill_node(fault, now)
            case Kind.HOT_GPU:
                return self._heat(fault, now)
            case Kind.ARBITER_KILL:
                return self._kill_arbiter(now)
            case Kind.SERVE_CONTROLLER_KILL:
                return self._kill_serve_controller()
            case Kind.PROVIDER_DOWN:
                self.stage.stop_provider()
                return Inflicted(
                    what="the provider is down",
                    at_s=time.time(),
                    healed=lambda _: True,
                    take_back=self.stage.start_provider,
                )
            case _:
                assert_never(fault.kind)

    def whole(self, now: Look) -> bool:
        """The gang has all its ranks, each node its agent, and every rank makes steps."""
        gang = gang_of(now)
        return (
            gang["phase"] in AT_WORK
            and gang["world_size"] == self.ranks
            and all(gang["pids"])
            and len(now["nodes"]) == len(self.stage.nodes)
            and not any(node["source_error"] for node in now["nodes"])
        )

    def _signal_rank(self, fault: Fault, now: Look, number: signal.Signals) -> Inflicted:
        gang = gang_of(now)
        rank = int(fault.draw * len(gang["pids"]))
        pid = gang["pids"][rank]
        before = gang["gang_generation"]
        at_s = time.time()
        os.kill(pid, number)
        return Inflicted(
            what=f"{number.name} to rank {rank}, process {pid}",
            at_s=at_s,
            healed=lambda look: gang_of(look)["gang_generation"] > before and gang_of(look)["phase"] in AT_WORK,
        )

    def _kill_node(self, fault: Fault, now: Look) -> Inflicted:
        gang = gang_of(now)
        held = sorted({node["name"] for node in now["nodes"] for gpu in node["gpus"] if gpu["gpu"] in gang["gpus"]})
        name = held[int(fault.draw * len(held))]
        gone = next(node["node"] for node in now["nodes"] if node["name"] == name)
        index = string.ascii_lowercase.index(name[-1])
        before = gang["gang_generation"]
        at_s = time.time()
        self.stage.cluster.kill_node(index)

        def replace() -> None:
            self.stage.cluster.start_node(index)
            self.outages.append(Outage(gpus=GPUS_PER_NODE, begin_s=at_s, end_s=time.time()))
            # What whoever brings a machine does: its health agent comes by itself, its pool of replicas by this.
            policy, app = (str(self.stage.folder / name) for name in ("policy.yaml", "images.yaml"))
            self.stage.command("tidegate", "up", "--policy", policy, "--app", app, "--redeploy")

        return Inflicted(
            what=f"SIGKILL to all of {name}",
            at_s=at_s,
            healed=lambda look: (
                gang_of(look)["gang_generation"] > before
                and gang_of(look)["phase"] in AT_WORK
                and gone not in {node["node"] for node in look["nodes"]}
            ),
            take_back=replace,
        )

    def _heat(self, fault: Fault, now: Look) -> Inflicted:
        gang = gang_of(now)
        gpu = gang["gpus"][int(fault.draw * len(gang["gpus"]))]
        name, index = next(
            (node["name"], one["index"]) for node in now["nodes"] for one in node["gpus"] if one["gpu"] == gpu
        )
        state = self.stage.gpu_state(name)
        at_s = time.time()
        state.set(index, "temp", HOT_CELSIUS)
        return Inflicted(
            what=f"GPU {index} of {name} reads {HOT_CELSIUS} °C",
            at_s=at_s,
            healed=lambda look: gpu not in gang_of(look)["gpus"] and gang_of(look)["phase"] in AT_WORK,
            take_back=lambda: state.set(index, "temp", WELL_CELSIUS),
        )

    def _kill_arbiter(self, now: Look) -> Inflicted:
        pid = self._actor("Arbiter")
        claims = [(claim["claim"], claim["state"]) for claim in now["claims"]]
        at_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return Inflicted(
            what=f"SIGKILL to the arbiter, process {pid}",
            at_s=at_s,
            # Its answers come from what it read back, and from reports that came in since.
            healed=lambda look: (
                look["at_s"] > at_s
                and [(claim["claim"], claim["state"]) for claim in look["claims"]] == claims
                and bool(look["gangs"])
                and bool(look["gateways"])
            ),
        )

    def _kill_serve_controller(self) -> Inflicted:
        pid = self._actor("ServeController")
        at_s = time.time()
        os.kill(pid, signal.SIGKILL)
        return Inflicted(
            what=f"SIGKILL to Serve's controller, process {pid}",
            at_s=at_s,
            healed=lambda look: bool(look["pools"]) and self._actors("ServeController") not in ([], [pid]),
        )

    def _actor(self, of_class: str) -> int:
        found = self._actors(of_class)
        if len(found) != 1:
            raise WaitedTooLongError(f"there are {len(found)} processes of {of_class}, not one")
        return found[0]

    def _actors(self, of_class: str) -> list[int]:
        """Processes of the cluster that Ray has given this title; it adds the method that runs."""
        title = f"ray::{of_class}"
        return [pid for pid in marked_processes(self.stage.cluster.marker) if _title(pid).split(".")[0] == title]


def gang_of(now: Look) -> dict[str, Any]:
    """The run's gang; right after the arbiter's restart it may not have reported yet."""
    unknown = {"phase": "unknown", "gang_generation": 0, "world_size": 0, "gpus": (), "pids": (), "step": -1}
    return now["gangs"][-1] if now["gangs"] else {**unknown, "committed_step": -1}


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:  # it has ended
        return ""
