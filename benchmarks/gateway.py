"""What the door costs: added latency and requests a second of ours, of a bare Serve app, and of LiteLLM's proxy.

The engine is a mock that answers at once with one small picture, so all that is measured is what stands before it. The
same client asks everybody in turn, each round in another order:

* `direct`: the mock engine itself, a uvicorn process: the floor. "Added" is a contender's seconds less these.
* `haproxy`: a bare Serve app of the same shape as ours (a FastAPI ingress, one hop to a replica, nothing else) under
  Serve's HAProxy ingress with throughput-optimized replicas; `plain`: the same under Serve's Python proxy, its default.
* `litellm`: LiteLLM's proxy before the mock engine, with one worker (its default) and with one for each core (what its
  documentation advises), without a database, keys or callbacks.
* `ingress`: the bare app without its hop, under HAProxy: shows what the hop costs.
* `ours`: the whole gateway (limits, callers, routing, ledger, metrics) under the same HAProxy ingress, its arbiter and
  health agents beside it.

Latency is of single requests, one after the other; requests a second are of 16 callers that ask again at once. Every
contender has the whole machine while it is asked: the others are up, and idle.

Takes about six minutes on two cores, and first some more for LiteLLM's venv.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml
from benchmarks.contenders.knock import Knocked, knock
from benchmarks.contenders.light_apps import MODEL, SIDE
from benchmarks.contract import Metric, compared, figure, publish
from benchmarks.peers.venv import PEERS, python_of

from benchmarks import arena
from tidegate.ports import free_port
from tidegate.testing.local_cluster import LocalCluster, end_with_parent

REPLICAS = 2
SLOTS = 16
"""Of one replica: more than anybody waits for, in every Serve app here."""
DOORS = 2
"""Ingress replicas of every Serve app here; LiteLLM has as many workers."""
CALLERS = 16
SINGLES = 400
SECONDS = 4.0
BODY = {"model": MODEL, "prompt": "a light", "size": f"{SIDE}x{SIDE}"}
PATH = "/v1/images/generations"
READY_S = 180.0

Found = dict[str, list[Knocked]]
"""Contender -> its rounds."""


def await_picture(url: str, process: subprocess.Popen[bytes] | None = None) -> None:
    """
    Raises:
        RuntimeError: no picture came in time, or the process has ended.
    """
    deadline = time.monotonic() + READY_S
    said = "nothing"
    while time.monotonic() < deadline and (process is None or process.poll() is None):
        try:
            response = httpx.post(url, json=BODY, timeout=10.0)
            if response.status_code == 200:
                return
            said = response.text[:300]
        except httpx.HTTPError as error:
            said = str(error)
        time.sleep(0.2)
    raise RuntimeError(f"{url} gave no picture in {READY_S:.0f} s: {said}")


@contextlib.contextmanager
def process(command: Sequence[str | Path], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    with (
        log.open("wb") as out,
        subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=out,
            stderr=out,
            cwd=log.parent,
            preexec_fn=end_with_parent,
        ) as started,
    ):
        try:
            yield started
        finally:
            started.terminate()
            try:
                started.wait(timeout=10)
            except subprocess.TimeoutExpired:
                started.kill()


@contextlib.contextmanager
def mock_engine(folder: Path) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.contenders.mock_engine", "--port", str(port)]
    path = os.pathsep.join(filter(None, (str(arena.ROOT), os.environ.get("PYTHONPATH"))))
    with process(command, folder / "engine.log", PYTHONPATH=path) as started:
        await_picture(f"http://127.0.0.1:{port}{PATH}", started)
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def litellm(folder: Path, engine: str, workers: int) -> Iterator[str]:
    port = free_port()
    config = folder / "litellm.yaml"
    way = {"model": f"openai/{MODEL}", "api_base": f"{engine}/v1", "api_key": "none"}
    config.write_text(yaml.safe_dump({"model_list": [{"model_name": MODEL, "litellm_params": way}]}), encoding="utf-8")
    command = [python_of("litellm"), PEERS / "litellm" / "proxy.py", "--config", config, "--port", str(port)]
    # As its page on production says, but for what it would only cost: a key to check, a database, JSON logs.
    settings = {
        "LITELLM_MODE": "PRODUCTION",
        "LITELLM_LOG": "ERROR",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
        "PYTHONPATH": "",
    }
    command += ["--num_workers", str(workers)]
    with process(command, folder / f"litellm-{workers}.log", **settings) as started:
        await_picture(f"http://127.0.0.1:{port}{PATH}", started)
        yield f"http://127.0.0.1:{port}"


def deploy(cluster: LocalCluster, http_port: int, applications: Sequence[Mapping[str, Any]]) -> None:
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": http_port},
        "applications": list(applications),
    }
    url = f"{cluster.dashboard_url}/api/serve/applications/"
    httpx.put(url, json=config, timeout=60.0).raise_for_status()


def bare_app(name: str, route_prefix: str, replicas: int = REPLICAS) -> dict[str, Any]:
    return {
        "name": name,
        "route_prefix": route_prefix,
        "import_path": "benchmarks.contenders.light_apps:bare",
        "args": {"replicas": replicas, "slots": SLOTS, "doors": DOORS},
    }


@contextlib.contextmanager
def plain_serve(base_port: int) -> Iterator[str]:
    with arena.cluster(base_port, (), ()) as cluster:
        deploy(cluster, base_port + 2, [bare_app("bare", "/")])
        url = f"http://127.0.0.1:{base_port + 2}"
        await_picture(f"{url}{PATH}")
        yield url


@contextlib.contextmanager
def haproxy_serve(folder: Path, base_port: int) -> Iterator[dict[str, str]]:
    """Ours and the bare apps behind one HAProxy."""
    environment = arena.fake_gpus(folder / "nvml", ("node-a",), REPLICAS)
    with arena.cluster(base_port, (REPLICAS,), environment, haproxy=True) as cluster:
        policy = arena.write_policy(folder, providers=[])
        arena.start_control_plane(policy, cluster.address)
        ours = {
            "name": "images",
            "route_prefix": "/",
            "import_path": "benchmarks.contenders.light_apps:images",
            "external_scaler_enabled": True,
            "args": {"policy": str(policy), "service_s": 0.0, "slots": SLOTS, "gateways": DOORS},
        }
        deploy(cluster, base_port + 2, [ours, bare_app("bare", "/bare"), bare_app("ingress", "/ingress", 0)])
        url = f"http://127.0.0.1:{base_port + 2}"
        urls = {"ours": url, "haproxy": f"{url}/bare", "ingress": f"{url}/ingress"}
        for each in urls.values():
            await_picture(f"{each}{PATH}")
        yield urls


@contextlib.contextmanager
def contenders(folder: Path, base_port: int) -> Iterator[dict[str, str]]:
    """Name -> address, all of them up."""
    cores = len(os.sched_getaffinity(0))
    with (
        mock_engine(folder) as direct,
        litellm(folder, direct, 1) as litellm_default,
        litellm(folder, direct, cores) as litellm_workers,
        plain_serve(base_port) as plain,
        haproxy_serve(folder, base_port + 3) as behind_haproxy,
    ):
        yield {
            "direct": direct,
            **behind_haproxy,
            "plain": plain,
            "litellm_default": litellm_default,
            "litellm_workers": litellm_workers,
        }


def measure(folder: Path, base_port: int, rounds: int) -> Found:
    with contenders(folder, base_port) as urls:
        found: Found = {name: [] for name in urls}
        names = list(urls)
        for number in range(rounds + 1):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                one = knock(f"{urls[name]}{PATH}", BODY, singles=SINGLES, callers=CALLERS, seconds=SECONDS)
                shown = f"p50 {1000 * one.p50_s:.2f} ms, p99 {1000 * one.p99_s:.2f} ms, {one.requests_per_s:.0f} /s"
                print(f"round {number or 'warm-up'}: {name}: {shown}", flush=True)
                if number:
                    found[name].append(one)
    return found


def metrics_of(found: Found) -> dict[str, Metric]:
    added = {name: [one.p50_s - floor.p50_s for one, floor in _pairs(found, name)] for name in found}
    # Over the floor's median: its own tail is the machine's.
    added_p99 = {name: [one.p99_s - floor.p50_s for one, floor in _pairs(found, name)] for name in found}
    rates = {name: [one.requests_per_s for one in found[name]] for name in found}
    best_latency = min(_litellms(found), key=lambda name: statistics.median(added[name]))
    best_rate = max(_litellms(found), key=lambda name: statistics.median(rates[name]))
    return {
        "over_haproxy": _ratio(added["ours"], added["haproxy"], "ours / theirs", "<= 1.5"),
        "under_litellm": _ratio(added["ours"], added[best_latency], "theirs / ours", ">= 5"),
        "rps_over_litellm": _ratio(rates["ours"], rates[best_rate], "ours / theirs", ">= 8"),
        "under_plain": _ratio(added["ours"], added["plain"], "theirs / ours", ">= 1"),
        "rps_over_haproxy": _ratio(rates["ours"], rates["haproxy"], "ours / theirs", ">= 0.67"),
        "rps_over_plain": _ratio(rates["ours"], rates["plain"], "ours / theirs", ">= 1"),
        "p99_over_haproxy": _ratio(added_p99["ours"], added_p99["haproxy"], "ours / theirs", "<= 1.5"),
        "p99_under_litellm": _ratio(added_p99["ours"], added_p99[best_latency], "theirs / ours", ">= 5"),
        "hop_s": figure(
            [hop - ingress for hop, ingress in zip(added["haproxy"], added["ingress"], strict=True)],
            goal="<= 0.001",
            note="of the bare app's p50: Serve's call from one deployment to another, which ours does without (decision"
            f" 0007); without it the same ingress adds {1000 * statistics.median(added['ingress']):.2f} ms and"
            f" answers {statistics.median(rates['ingress']):.0f} requests/s",
        ),
        "direct_p50_s": figure([one.p50_s for one in found["direct"]], goal="<= 0.001", note="the floor"),
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float], ratio: Any, goal: str) -> Metric:
    return compared(ours, theirs, role="peer", ratio=ratio, goal=goal)


def _pairs(found: Found, name: str) -> Iterator[tuple[Knocked, Knocked]]:
    return zip(found[name], found["direct"], strict=True)


def _litellms(found: Found) -> list[str]:
    return [name for name in found if name.startswith("litellm")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="after one of warm-up")
    parser.add_argument("--base-port", type=int, default=7670, help="six ports from here on are used")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        found = measure(Path(folder), arguments.base_port, arguments.rounds)
    publish("gateway", metrics_of(found), rounds=arguments.rounds, packages=("tidegate", "ray"))


if __name__ == "__main__":
    main()
