"""The sources of one node, and how each is asked: what the agent, `tidegate doctor` and the benchmarks all use."""

from __future__ import annotations

import os
from pathlib import Path

from tidegate.clock import Clock
from tidegate.health.feeds import Feed
from tidegate.health.readings import DCGM_S, HOST_S, Signal, Source
from tidegate.health.sources.dcgm import DcgmSource
from tidegate.health.sources.host import HostSource
from tidegate.health.sources.infiniband import InfinibandSource
from tidegate.health.sources.kmsg import KmsgSource
from tidegate.health.sources.nvml import NvmlSource
from tidegate.health.sources.nvml_events import NvmlEventSource
from tidegate.ids import NodeId
from tidegate.spec.policy import HealthSpec

_DCGM_LAG_S = 60.0
"""An exporter shows an XID at its next sample, 30 s later by default, and we see that at our next scrape."""


def feeds_of(spec: HealthSpec, node: NodeId, clock: Clock | None = None) -> list[Feed]:
    """All sources of this node. The better one goes first: NVML's temperature is a second old, an exporter's thirty."""
    wanted = spec.sources
    feeds = [nvml_feed(NvmlSource(spec.nvml_library, node=node, clock=clock), spec)]
    if wanted.kmsg is not None:
        kmsg = KmsgSource(_here(wanted.kmsg), node=node, clock=clock)
        feeds.append(_feed("kmsg", kmsg, Signal.KMSG_ANSWERS, spec, spec.period_s))
    events = NvmlEventSource(spec.nvml_library, node=node, clock=clock)
    # The set waits in the driver, so its looks follow each other without a rest.
    feeds.append(_feed("nvml-events", events, Signal.NVML_EVENTS_ANSWERS, spec, 0.0, lasting=True))
    infiniband = InfinibandSource(_here(wanted.ib_root), node=node, clock=clock)
    feeds.append(_feed("infiniband", infiniband, Signal.IB_ANSWERS, spec, spec.period_s))
    host = HostSource(node=node, disks=[_here(path) for path in wanted.disks], clock=clock)
    feeds.append(_feed("host", host, Signal.HOST_ANSWERS, spec, max(HOST_S, spec.period_s)))
    if wanted.dcgm_url is not None:
        dcgm = DcgmSource(wanted.dcgm_url, node=node, clock=clock)
        period_s = max(DCGM_S, spec.period_s)
        feeds.append(_feed("dcgm", dcgm, Signal.DCGM_ANSWERS, spec, period_s, lag_s=_DCGM_LAG_S, lasting=True))
    return feeds


def nvml_feed(source: Source, spec: HealthSpec) -> Feed:
    """The one that each look of the agent waits for."""
    return Feed(
        name="nvml",
        source=source,
        answers=Signal.NVML_ANSWERS,
        period_s=spec.period_s,
        deadline_s=spec.reading_deadline_s,
        waited_for=True,
    )


def _here(path: str) -> Path:
    """A path of the policy on this node: `~` and `$NAMES` are its own."""
    return Path(os.path.expandvars(path)).expanduser()


def _feed(
    name: str,
    source: Source,
    answers: Signal,
    spec: HealthSpec,
    period_s: float,
    *,
    lag_s: float = 5.0,
    lasting: bool = False,
) -> Feed:
    return Feed(
        name=name,
        source=source,
        answers=answers,
        period_s=period_s,
        deadline_s=spec.reading_deadline_s,
        lag_s=lag_s,
        lasting=lasting,
    )
