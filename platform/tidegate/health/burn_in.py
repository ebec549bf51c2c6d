"""A node's burn-in before it trains, or comes back (specification 5): look, then products and copies on all GPUs at
once, then sums inside the node. Cheap things first; what fails ends it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tidegate.arbiter.messages import Action, Check
from tidegate.clock import SystemClock
from tidegate.health.burning import run_parts
from tidegate.health.doctor import Found, disk, durable_write_speed, fabric, host, infiniband
from tidegate.health.history import History
from tidegate.health.judge import judge
from tidegate.health.loopback import loopbacks
from tidegate.health.marks import (
    Marks,
    Measure,
    Measured,
    against_marks,
    alike,
    marks_of,
    one_driver,
    temperatures,
)
from tidegate.health.readings import Reading, Round, Signal, Status
from tidegate.health.sources.infiniband import InfinibandSource
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId
from tidegate.ports import free_port
from tidegate.processes import end_with_parent
from tidegate.spec.policy import HealthSpec

CPU = "cpu"
LOOKS = 3
"""What only two looks in a row find bad is found too."""
LOOK_EVERY_S = 0.2
DEEP_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Burned:
    """What one node's burn-in has found."""

    node: NodeId
    model: str
    driver: str
    """Its version; empty where no NVML answers."""
    gpus: tuple[str, ...]
    """UUIDs, or names where no NVML answers."""
    checks: tuple[Check, ...]
    measured: tuple[Measured, ...]
    """Not judged yet: the other nodes' are needed for that."""
    sums: Mapping[str, str]
    """Of the seeded products, by GPU."""
    took_s: float


def burn_node(
    spec: HealthSpec,
    node: NodeId,
    slots: int,
    *,
    deadline_s: float,
    deep: bool = False,
    marks: Marks | None = None,
    only: Collection[str] | None = None,
) -> Burned:
    """Runs on the node. `slots`: GPUs that Ray counts there; `marks`: of its model, if not those of `marks.py`; `only`:
    GPUs that come back, or that a gang is given, whatever is said of the others."""
    began_s = time.monotonic()
    seen, driver, checks = _look(spec, node, slots)
    gpus: tuple[str, ...] = tuple(gpu.uuid for gpu in seen.gpus) or tuple(
        f"{node[:12]}-{index}" for index in range(slots)
    )
    if only is not None:
        missing = [gpu for gpu in only if seen.gpus and gpu not in gpus]
        checks += [Check(name="inventory", subject=gpu, passed=False, text="NVML lists no such GPU") for gpu in missing]
        gpus = tuple(only)
        checks = _of(gpus, node, checks)
    model, measured, sums = CPU, list[Measured](), dict[str, str]()
    if all(check.passed for check in checks):
        model, measured, sums, more = _burn(gpus, bool(seen.gpus), marks, deadline_s)
        checks += more
        checks += _of(gpus, node, temperatures(_celsius(seen), _celsius(_read(spec, node)), marks or marks_of(model)))
        checks += _host(spec, must=model != CPU)
        # The ports are the whole node's: on one where other GPUs may be at work, traffic would disturb their gang.
        if set(gpus) >= {gpu.uuid for gpu in seen.gpus}:
            checks += _loopbacks(spec, must=model != CPU)
    if deep and all(check.passed for check in checks):
        checks.append(_deep(node))
    took_s = time.monotonic() - began_s
    return Burned(
        node=node,
        model=model,
        driver=driver,
        gpus=gpus,
        checks=tuple(checks),
        measured=tuple(measured),
        sums=sums,
        took_s=took_s,
    )


def _of(gpus: Collection[str], node: NodeId, checks: Iterable[Check]) -> list[Check]:
    """Those that speak of the GPUs that are examined, or of the whole node."""
    return [check for check in checks if check.subject in (*gpus, node)]


def _look(spec: HealthSpec, node: NodeId, slots: int) -> tuple[Round, str, list[Check]]:
    """What NVML says, its driver's version, and what follows: inventory, and all rules of the table over a few looks,
    of which none that would take the node out may hold."""
    history, seen = History(), Round(readings=())
    newest: dict[tuple[str, Signal], Reading] = {}
    source = NvmlSource(spec.nvml_library, node=node)
    try:
        for _ in range(LOOKS):
            seen = source.read()
            newest |= {(reading.subject, reading.signal): reading for reading in seen.readings}
            history = judge(seen.readings, history, spec, SystemClock().now_s()).history
            time.sleep(LOOK_EVERY_S)
    finally:
        source.close()
    found = [trace.standing for trace in history.traces.values() if trace.standing is not None]
    checks = [
        Check(name=f"rule {verdict.rule}", subject=verdict.gpu or node, passed=False, text=verdict.evidence)
        for verdict in found
        if verdict.action is not Action.WARN
    ]
    if seen.gpus:
        declared = spec.gpus_per_node or slots
        text = f"{len(seen.gpus)} GPUs, declared {declared}"
        checks.insert(0, Check(name="inventory", subject=node, passed=len(seen.gpus) >= declared, text=text))
        checks += _settings(newest.values())
    return seen, source.driver, checks


def _settings(readings: Iterable[Reading]) -> list[Check]:
    wanted = {
        Signal.GPU_MIG: (0.0, "MIG mode"),
        Signal.GPU_ECC_ENABLED: (1.0, "ECC"),
        Signal.GPU_PERSISTENCE: (1.0, "persistence (`nvidia-smi -pm 1`)"),
    }
    return [
        Check(name=what, subject=reading.subject, passed=reading.value == good, text="on" if reading.value else "off")
        for reading in readings
        if reading.status is Status.OK and reading.signal in wanted
        for good, what in (wanted[reading.signal],)
    ]


def _burn(
    gpus: Sequence[str], real: bool, marks: Marks | None, deadline_s: float
) -> tuple[str, list[Measured], dict[str, str], list[Check]]:
    """The model, what was measured, the sums, and what failed."""
    asked = {"part": "gpu", "marks": _plain(marks) if marks is not None else None}
    # Its own device first; the next one is for the copy from peer to peer.
    seen_by = [",".join((gpu, gpus[(place + 1) % len(gpus)])[: len(gpus)]) for place, gpu in enumerate(gpus)]
    answers = run_parts([asked] * len(gpus), [_environment(devices, real) for devices in seen_by], deadline_s)
    failed = [
        Check(name="products and copies", subject=gpu, passed=False, text=answer["failed"])
        for gpu, answer in zip(gpus, answers, strict=True)
        if "failed" in answer
    ]
    if failed:
        return "", [], {}, failed
    model = str(answers[0]["model"])
    checks = [
        Check(name="one model", subject=gpu, passed=answer["model"] == model, text=str(answer["model"]))
        for gpu, answer in zip(gpus, answers, strict=True)
    ]
    measured = [
        Measured(measure=Measure(name), subject=gpu, value=value)
        for gpu, answer in zip(gpus, answers, strict=True)
        for name, value in answer["measured"].items()
    ]
    sums = {gpu: str(answer["sum"]) for gpu, answer in zip(gpus, answers, strict=True)}
    if len(gpus) > 1:
        parts = [
            group_part(rank, len(gpus), "127.0.0.1", marks or marks_of(model), deadline_s) for rank in range(len(gpus))
        ]
        port = free_port()
        answers = run_parts(
            [{**part, "port": port} for part in parts], [_environment(gpu, real) for gpu in gpus], deadline_s
        )
        checks += group_checks("sum in the node", "the node", answers)
        busbw = [answer["busbw_gbytes_per_s"] for answer in answers if "failed" not in answer]
        measured += [Measured(measure=Measure.IN_NODE, subject="the node", value=min(busbw))] if busbw else []
    return model, measured, sums, checks


def group_part(rank: int, size: int, address: str, marks: Marks, deadline_s: float) -> dict[str, Any]:
    """What one process of a sum is told; the port is still to be named."""
    told = {"part": "group", "rank": rank, "size": size, "address": address}
    return {**told, "marks": _plain(marks), "timeout_s": 0.8 * deadline_s}


def group_checks(name: str, subject: str, answers: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Whether all processes of a sum came to its end, and to the right result."""
    bad = [str(answer.get("failed", "a wrong sum")) for answer in answers if "failed" in answer or not answer["right"]]
    return [Check(name=name, subject=subject, passed=not bad, text="; ".join(dict.fromkeys(bad)) or "right")]


def pair_part(
    gpus: Sequence[str], real: bool, first_rank: int, size: int, at: tuple[str, int], marks: Marks, deadline_s: float
) -> list[dict[str, Any]]:
    """One node's processes of a pair's sum; runs on the node."""
    address, port = at
    parts = [group_part(first_rank + place, size, address, marks, deadline_s) for place in range(len(gpus))]
    return run_parts([{**part, "port": port} for part in parts], [_environment(gpu, real) for gpu in gpus], deadline_s)


def judged(all_burned: Sequence[Burned], marks: Marks | None = None) -> dict[NodeId, list[Check]]:
    """Each node's checks with those for which the others are needed: medians and bits over all GPUs of one model."""
    checks = {burned.node: list(burned.checks) for burned in all_burned}
    for model in sorted({burned.model for burned in all_burned if burned.measured}):
        same = [burned for burned in all_burned if burned.model == model]
        named = [
            Measured(measure=one.measure, subject=f"{burned.node}/{one.subject}", value=one.value)
            for burned in same
            for one in burned.measured
        ]
        sums = {f"{burned.node}/{gpu}": text for burned in same for gpu, text in burned.sums.items()}
        for check in (*against_marks(named, marks or marks_of(model)), *alike(sums)):
            node, subject = check.subject.split("/", 1)
            checks[NodeId(node)].append(Check(name=check.name, subject=subject, passed=check.passed, text=check.text))
    # Failed before its products, a node tells no model: it is out already.
    for model in sorted({burned.model for burned in all_burned if burned.model}):
        drivers = {one.node: one.driver for one in all_burned if one.model == model and one.driver}
        for check in one_driver(drivers):
            checks[NodeId(check.subject)].append(check)
    return checks


def write_record(
    folder: Path, name: str, burned: Burned, checks: Sequence[Check], *, signed_by: str, at_s: float
) -> Path:
    """The node's record, signed off: who had it examined, when, against which marks, and a hash over all of it."""
    record: dict[str, Any] = {
        "node": burned.node,
        "name": name,
        "model": burned.model,
        "gpus": list(burned.gpus),
        "passed": all(check.passed for check in checks),
        "took_s": round(burned.took_s, 2),
        "marks": _plain(marks_of(burned.model)),
        "checks": [asdict(check) for check in checks],
        "signed_off": {"by": signed_by, "at_s": at_s},
    }
    record["sha256"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    half = path.with_suffix(".half")
    half.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    half.replace(path)
    return path


def is_untouched(record: Mapping[str, Any]) -> bool:
    """Whether a record says what it said when it was signed off."""
    rest = {key: value for key, value in record.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest() == record.get("sha256")


def main() -> None:
    """Told by JSON on stdin, answers by a line of it on stdout; `do` says what:

    `examine`: one node (`spec`, `node`, `slots`, `only`); its checks, judged by themselves.
    `burn`: the same node, not judged yet.
    `judge`: all that several nodes have answered to `burn`, together (`burned`); the checks of each node.
    """
    end_with_parent()
    told = json.loads(sys.stdin.read())
    if told["do"] == "judge":
        all_burned = TypeAdapter(list[Burned]).validate_python(told["burned"])
        answer: Any = {node: [asdict(check) for check in checks] for node, checks in judged(all_burned).items()}
    else:
        spec = HealthSpec.model_validate_json(told["spec"])
        node = NodeId(told["node"])
        burned = burn_node(spec, node, told["slots"], deadline_s=spec.burn_in.deadline_s, only=told["only"])
        if told["do"] == "burn":
            answer = TypeAdapter(Burned).dump_python(burned, mode="json")
        else:
            answer = [asdict(check) for check in judged([burned])[node]]
    sys.stdout.write(json.dumps(answer) + "\n")


def _environment(devices: str, real: bool) -> dict[str, str]:
    shown = devices if real else ""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": shown, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "OMP_NUM_THREADS": "1"}


def _read(spec: HealthSpec, node: NodeId) -> Round:
    source = NvmlSource(spec.nvml_library, node=node)
    try:
        return source.read()
    finally:
        source.close()


def _celsius(seen: Round) -> dict[str, float]:
    heat = [reading for reading in seen.readings if reading.signal is Signal.GPU_TEMPERATURE]
    return {reading.subject: reading.value for reading in heat if reading.value is not None}


def _host(spec: HealthSpec, *, must: bool) -> list[Check]:
    """What `tidegate doctor` says of the machine; without a GPU it is only told."""
    found = [*host(spec), disk(spec, durable_write_speed)]
    if must:
        found += fabric(Path("/"), needs_rdma=infiniband(spec)[0] > 0)
    return [
        Check(
            name=check.name,
            subject="the node",
            passed=check.found is not Found.WRONG or not must,
            text=check.text + (f"; {check.fix}" if check.fix else ""),
        )
        for check in found
    ]


def _loopbacks(spec: HealthSpec, *, must: bool) -> list[Check]:
    program = shutil.which("ib_write_bw")
    readings = InfinibandSource(Path(spec.sources.ib_root), node=NodeId("this node")).read().readings if must else ()
    active = {r.subject for r in readings if r.signal is Signal.IB_PORT_STATE and r.value == 4}
    infiniband = {r.subject for r in readings if r.signal is Signal.IB_PORT_ETHERNET and r.value == 0}
    rates = {r.subject: r.value / 1e9 for r in readings if r.signal is Signal.IB_PORT_RATE and r.value}
    ports = {port: rates[port] for port in sorted(active & infiniband) if port in rates}
    if not ports:
        return []
    if program is None:
        text = "ib_write_bw (package perftest) is not installed"
        return [Check(name="InfiniBand loopback", subject="the node", passed=True, text=text)]
    return loopbacks(program, ports)


def _deep(node: NodeId) -> Check:
    program = shutil.which("dcgmi")
    if program is None:
        return Check(name="dcgmi diag -r 2", subject=node, passed=True, text="dcgmi is not installed")
    done = subprocess.run([program, "diag", "-r", "2"], capture_output=True, text=True, timeout=DEEP_S, check=False)
    text = (done.stdout + done.stderr).strip()[-500:]
    return Check(name="dcgmi diag -r 2", subject=node, passed=done.returncode == 0, text=text)


def _plain(marks: Marks) -> Any:
    return TypeAdapter(Marks).dump_python(marks, mode="json")


if __name__ == "__main__":
    main()
