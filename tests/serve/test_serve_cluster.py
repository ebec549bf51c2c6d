"""The whole room on a real cluster: real Serve, real replicas, a real provider process, the real openai client.

Only the arbiter is scripted: an actor under its name that tells the gateways what the test says.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest
import ray
import yaml
from ray import serve
from ray.serve._private.common import DeploymentID
from ray.serve.config import HTTPOptions, ProxyLocation
from stand_in import StandIn

from tidegate.arbiter.client import ACTOR_NAME, NAMESPACE
from tidegate.arbiter.messages import GatewayReport, Orders, ReplicaReport, Spillway, Stage, Weights
from tidegate.arbiter.pools_on_serve import lay_pools
from tidegate.ids import Generation, NodeId, PoolName, pool_name, pools_app
from tidegate.ports import free_port
from tidegate.serve.admission import Limits
from tidegate.serve.arbiter_link import canary_job
from tidegate.serve.backends import PoolSeen
from tidegate.serve.ledger_reading import RequestRow, read_rows, read_totals
from tidegate.serve.pools import RayPools
from tidegate.serve.work import Made, PoolBusyError, Size
from tidegate.spec.load import load_model
from tidegate.train.config import RunConfig
from tidegate.train.export import write_export
from tidegate.train.model import seeded
from tidegate.train.recipe import Recipe
from waiting import until, wait_until

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
APP = "images"
MODEL = "tidegate-digits"


@ray.remote(num_cpus=0)
class ScriptedArbiter:
    """Says what it was told to say, and remembers what it heard last."""

    def __init__(self) -> None:
        self.orders = Orders(generation=Generation(1), spillway=Spillway.CLOSED, allowances={})
        self.weights: Weights | None = None
        self.gateways: dict[str, GatewayReport] = {}
        self.replicas: dict[str, ReplicaReport] = {}

    def exchange(self, report: GatewayReport, wait_s: float) -> Orders:
        self.gateways[report.gateway] = report
        return self.orders

    def report_replica(self, app: str, report: ReplicaReport) -> Weights | None:
        self.replicas[report.replica] = report
        return self.weights

    def order(self, orders: Orders) -> None:
        self.orders = orders

    def publish(self, weights: Weights | None) -> None:
        self.weights, self.replicas = weights, {}

    def heard(self) -> tuple[dict[str, GatewayReport], dict[str, ReplicaReport]]:
        return self.gateways, self.replicas


@dataclass
class Room:
    """The app under test and the strings it hangs on."""

    url: str
    pool: PoolName
    arbiter: Any
    stand_in: StandIn
    state_dir: Path
    exports: Path
    generation: int = 1
    client: openai.OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=90)

    def order(self, spillway: Spillway, canary: str | None = None, **allowances: int) -> None:
        """Give orders and wait for the gateway's acknowledgement."""
        self.generation += 1
        allowed = {PoolName(name): count for name, count in allowances.items()}
        generation = Generation(self.generation)
        orders = Orders(generation=generation, spillway=spillway, allowances=allowed, canary=canary)
        ray.get(self.arbiter.order.remote(orders))
        wait_until(lambda: self.gateway().acked == generation, 20, f"the gateway to follow orders {generation}")

    def gateway(self) -> GatewayReport:
        (report,) = self.heard()[0].values()
        return report

    def heard(self) -> tuple[dict[str, GatewayReport], dict[str, ReplicaReport]]:
        heard: tuple[dict[str, GatewayReport], dict[str, ReplicaReport]] = ray.get(self.arbiter.heard.remote())
        return heard

    def scale(self, replicas: int) -> None:
        """As the arbiter does: by Serve's external scaler."""
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(self.pool, pools_app(APP)), replicas))

    def replica_states(self) -> dict[str, str] | None:
        """The pool's replicas as Serve lists them, pending ones too. None: it doesn't know the pool yet."""
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        details = ray.get(controller.get_serve_instance_details.remote())
        pools = details["applications"].get(pools_app(APP), {}).get("deployments", {})
        if self.pool not in pools:
            return None
        replicas = pools[self.pool]["replicas"]
        return {row["replica_id"]: str(getattr(row["state"], "value", row["state"])) for row in replicas}

    def running(self) -> int:
        return sum(load.replicas for load in self.gateway().pools)

    def wait_running(self, replicas: int) -> None:
        wait_until(lambda: self.running() == replicas, 90, f"{replicas} replicas to be seen by the gateway")

    def make(self, prompt: str = "a three", **more: Any) -> tuple[str, bytes]:
        """One picture by the openai client: where it was made, and its bytes."""
        answer = self.client.images.with_raw_response.generate(model=MODEL, prompt=prompt, extra_body=more)
        (picture,) = answer.parse().data or []
        assert picture.b64_json is not None
        return str(answer.headers["x-tidegate-backend"]), base64.b64decode(picture.b64_json)

    @contextmanager
    def load(self, threads: int = 4) -> Iterator[Counter[str]]:
        """Requests without a pause from `threads` clients; the counter says where each was answered."""
        places: Counter[str] = Counter()
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                places[self.make()[0].partition("/")[0]] += 1

        with ThreadPoolExecutor(threads) as clients:
            asking = [clients.submit(ask) for _ in range(threads)]
            try:
                yield places
            finally:
                stop.set()
        for done in asking:
            done.result()  # raises what a client saw: any error fails the test


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory, stand_in_process: StandIn) -> Iterator[Room]:
    work = tmp_path_factory.mktemp("room")
    exports = work / "exports"
    export(exports / "first", seed=1)
    policy = work / "policy.yaml"
    policy.write_text(
        yaml.safe_dump(
            {
                "arbiter": {"state_dir": str(work / "state")},
                "serving": {"patience_s": 2.0, "request_deadline_s": 60.0, "drain_deadline_s": 5.0},
                "providers": [stand_in_process.spec().model_dump(exclude_none=True)],
            }
        )
    )
    # A short path of its own: unix sockets below it may have 107 characters.
    temp_dir = Path(os.environ.get("TMPDIR", "/tmp")) / f"tg{os.getpid()}"
    port = free_port()
    ray.init(
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        _temp_dir=str(temp_dir),
        object_store_memory=100 * 2**20,
        log_to_driver=False,
    )
    try:
        arbiter = ScriptedArbiter.options(name=ACTOR_NAME, namespace=NAMESPACE).remote()
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options=HTTPOptions(host="127.0.0.1", port=port))
        app = images_app()
        args = app.ImagesArgs(weights=str(exports / "first"), model=MODEL, policy=str(policy))
        serve.run(app.build(args), name=APP, route_prefix="/")
        node = NodeId(ray.nodes()[0]["NodeID"])
        room = Room(f"http://127.0.0.1:{port}", pool_name(node), arbiter, stand_in_process, work / "state", exports)
        wait_until(lambda: room.heard()[0], 60, "the gateway's first report")
        plan = room.gateway().plan
        assert plan is not None
        lay_pools(APP, plan, {node: 0})  # as the arbiter does
        wait_until(lambda: room.replica_states() is not None, 20, "Serve to know the pool")
        room.order(Spillway.CLOSED, **{room.pool: 2})
        room.scale(2)
        room.wait_running(2)
        yield room
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(temp_dir, ignore_errors=True)


def images_app() -> ModuleType:
    """`serve_apps/` is no package: an operator names the file."""
    spec = importlib.util.spec_from_file_location("images_app", ROOT / "serve_apps" / "images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def export(folder: Path, seed: int, bias: float = 0.0) -> Path:
    """With a large `bias` every pixel ends at one end of its range."""
    config = load_model(ROOT / "jobs" / "configs" / "digits.yaml", RunConfig)
    weights = seeded(config.model, seed).state_dict()
    weights["final_layer.linear.bias"] += bias
    write_export(folder, config.model, weights, Recipe.of(config), run="test", step=seed)
    return folder


def test_the_openai_client_works_unchanged(room: Room) -> None:
    room.order(Spillway.CLOSED)
    ask = room.client.images.generate
    answer = ask(model=MODEL, prompt="a seven", n=3, size="8x8", extra_body={"seed": 7})  # type: ignore[arg-type]
    pictures = [picture.b64_json for picture in answer.data or []]
    assert len(set(pictures)) == 3  # C176: image i has its own seed
    assert (answer.size, answer.output_format) == ("8x8", "png")  # C175
    assert room.make("a seven", seed=9) == (f"local/{room.pool}", base64.b64decode(pictures[2] or ""))
    assert [model.id for model in room.client.models.list().data] == [MODEL]


def test_unfinished_pictures_stream_from_a_replica_to_the_client(room: Room) -> None:
    room.order(Spillway.CLOSED)
    _, whole = room.make("a seven", seed=9)
    how = {"model": MODEL, "prompt": "a seven", "stream": True, "partial_images": 2}
    with room.client.images.generate(**how, extra_body={"seed": 9}) as stream:  # type: ignore[call-overload]
        events = list(stream)
    kinds = [event.type.rpartition(".")[2] for event in events]
    assert kinds == ["partial_image", "partial_image", "completed"]
    assert [event.partial_image_index for event in events[:2]] == [0, 1]
    assert base64.b64decode(events[-1].b64_json) == whole
    assert events[-1].tidegate["backend"] == f"local/{room.pool}"
    wait_until(lambda: all(load.ongoing == 0 for load in room.gateway().pools), 20, "the slot to be free")


def test_errors_have_openais_shape(room: Room) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:  # C179
        room.client.images.generate(model="a model that does not exist", prompt="x")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as huge:  # C172
        room.client.images.generate(model=MODEL, prompt="x", size="100000x10000")  # type: ignore[call-overload]
    assert huge.value.param == "size"
    lost = httpx.get(f"{room.url}/v1/imagez")
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "invalid_request_error")
    no_model = httpx.post(f"{room.url}/v1/images/generations", json={"prompt": "a two"}, timeout=20)  # C178
    assert no_model.status_code == 200


def test_an_answer_names_its_row_in_the_ledger(room: Room) -> None:
    """A client may send any `x-request-id`, the same one again too: it is echoed, once, and no row goes by it."""
    url, mine = f"{room.url}/v1/images/generations", {"x-request-id": "mine"}
    answers = [httpx.post(url, json=body, headers=mine, timeout=20) for body in ({"prompt": "a two"}, {})]
    assert [answer.status_code for answer in answers] == [200, 400]
    assert [answer.headers.get_list("x-request-id") for answer in answers] == [["mine"], ["mine"]]
    ids = [answer.headers["x-tidegate-request-id"] for answer in answers]

    def outcomes() -> list[str | None]:
        rows = {row.request_id: row.outcome for row in read_rows(room.state_dir / "ledger")}
        return [rows.get(one) for one in ids]

    wait_until(lambda: outcomes() == ["answered", "refused"], 20, "the ledger's rows")


def test_a_job_is_made_by_a_replica_and_fetched_later(room: Room) -> None:
    room.order(Spillway.CLOSED)
    jobs = f"{room.url}/v1/images/jobs"
    submitted = httpx.post(jobs, json={"prompt": "a seven", "seed": 9, "local_only": True}, timeout=20)
    assert submitted.status_code == 202
    address = f"{room.url}{submitted.headers['location']}"
    wait_until(lambda: httpx.get(address).json()["ended_at"], 30, "the job to end")
    job = httpx.get(address).json()
    assert (job["status"], job["backend"]) == ("succeeded", f"local/{room.pool}")
    assert base64.b64decode(job["answer"]["data"][0]["b64_json"]) == room.make("a seven", seed=9)[1]


def test_pools_to_zero_under_load_and_back(room: Room) -> None:
    """C003: no request fails on the way down, at zero, or on the way up; the last test holds the books to it."""
    room.order(Spillway.CLOSED)
    with room.load() as places:
        wait_until(lambda: places["local"] >= 10, 60, "local answers")
        assert places["provider"] == 0
        room.order(Spillway.OPEN, **{room.pool: 0})
        room.scale(0)
        room.wait_running(0)
        before = places["provider"]
        wait_until(lambda: places["provider"] >= before + 20, 60, "answers by the provider")
        at_zero = places["local"]
        room.scale(2)
        room.wait_running(2)
        assert places["local"] == at_zero  # running, yet not allowed: traffic comes home when it is told to
        room.order(Spillway.CLOSED)
        wait_until(lambda: places["local"] >= at_zero + 10, 60, "local answers again")


def test_an_upscale_taken_back_cancels_what_has_not_started(room: Room) -> None:
    """C001: what has not started goes, what serves keeps serving.

    C013: Ray 2.60 lets a replica that was never scheduled have its whole grace (5 s here); so the arbiter asks for a
    replica only where a GPU is free (`arbiter/pools.py`), and there is none to cancel.
    """
    room.order(Spillway.CLOSED)
    room.wait_running(2)
    before = room.replica_states()
    with room.load() as places:
        room.scale(4)
        wait_until(lambda: len(room.replica_states() or ()) == 4, 20, "two more replicas, for which there is no GPU")
        room.scale(2)
        wait_until(lambda: room.replica_states() == before, 15, "the pending replicas to be gone, and no other")
        after = places["local"]
        wait_until(lambda: places["local"] >= after + 10, 60, "local answers")


def test_a_dying_replica_costs_no_request(room: Room) -> None:
    room.order(Spillway.CLOSED)
    room.wait_running(2)
    with room.load() as places:
        wait_until(lambda: places["local"] >= 5, 60, "local answers")
        named = ray.util.list_named_actors(all_namespaces=True)
        replica = next(actor for actor in named if room.pool in actor["name"])
        ray.kill(ray.get_actor(replica["name"], replica["namespace"]))
        after = places["local"]
        wait_until(lambda: places["local"] >= after + 20, 60, "local answers after the kill")
    room.wait_running(2)


def test_a_full_or_empty_pool_refuses_at_once(room: Room) -> None:
    """By lines of this process: Serve's own router would let each request wait."""
    room.order(Spillway.CLOSED)
    room.wait_running(2)
    job = replace(canary_job(Limits(model=MODEL, sizes=(Size(8, 8),))), images=10, steps=200)

    async def story() -> None:
        pools = RayPools(APP)
        pools.follow([room.pool])
        idle = PoolSeen(replicas=2, ongoing=0, slots_each=2)
        await until(lambda: pools.seen()[room.pool] == idle, 20, "both replicas to be reached")
        calls = [asyncio.create_task(pools.make(room.pool, job, 60.0)) for _ in range(6)]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [Made] * 4 + [PoolBusyError] * 2  # two replicas of two slots
        assert pools.seen()[room.pool] == idle
        with pytest.raises(TimeoutError):
            await pools.make(room.pool, job, 0.1)
        await until(lambda: pools.seen()[room.pool] == idle, 20, "the slot to be free")
        room.scale(0)
        await until(lambda: pools.seen()[room.pool].replicas == 0, 60, "the empty pool to be known")
        with pytest.raises(PoolBusyError):
            await pools.make(room.pool, job, 10.0)
        pools.close()

    asyncio.run(story())


def test_local_only_waits_for_the_pool_to_come_home(room: Room) -> None:
    room.order(Spillway.OPEN)
    room.scale(0)
    room.wait_running(0)
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(room.make, "a one", local_only=True)
        wait_until(lambda: room.gateway().waiting == 1, 20, "the request to wait")
        room.scale(2)
        assert waiting.result(timeout=90)[0] == f"local/{room.pool}"
    room.wait_running(2)


def test_canary_is_asked_once_of_every_provider(room: Room) -> None:
    before = room.stand_in.stats()["answered"]
    room.order(Spillway.CLOSED, canary="claim-1")
    wait_until(lambda: bool(room.gateway().canaries), 20, "the canary's result")
    (result,) = room.gateway().canaries
    assert (result.canary, result.provider, result.ok) == ("claim-1", "stand-in", True)
    room.order(Spillway.CLOSED, canary="claim-1")
    room.order(Spillway.CLOSED, canary="claim-2")
    wait_until(lambda: room.gateway().canaries[0].canary == "claim-2", 20, "the next canary's result")
    assert room.stand_in.stats()["answered"] == before + 2


def test_a_client_that_leaves_frees_the_replica(room: Room) -> None:
    room.order(Spillway.CLOSED)
    body = {"prompt": "a nine", "n": 10, "num_inference_steps": 200, "local_only": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{room.url}/v1/images/generations", json=body, timeout=httpx.Timeout(5, read=0.3))
    folder = room.state_dir / "ledger"
    wait_until(lambda: bool(cancelled(folder)), 20, "the ledger's row")
    (row,) = cancelled(folder)
    assert row.attempts == 1
    wait_until(lambda: all(load.ongoing == 0 for load in room.gateway().pools), 20, "the slot to be free")


def cancelled(folder: Path) -> list[RequestRow]:
    return [row for row in read_rows(folder) if row.outcome == "cancelled"]


def test_new_weights_are_swapped_in_and_a_corrupt_export_is_not(room: Room) -> None:
    """C193: the old weights serve until the new ones are proven, and after a refusal."""
    room.order(Spillway.CLOSED)
    _, first = room.make("a four", seed=5)
    second = export(room.exports / "second", seed=2)
    ray.get(room.arbiter.publish.remote(Weights(version=1, uri=str(second))))
    wait_until(lambda: serving_versions(room) == {1} and len(room.heard()[1]) == 2, 60, "both replicas to swap")
    _, swapped = room.make("a four", seed=5)
    assert swapped != first

    corrupt = export(room.exports / "corrupt", seed=3)
    (weights,) = (corrupt / "transformer").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    ray.get(room.arbiter.publish.remote(Weights(version=2, uri=str(corrupt))))
    wait_until(lambda: sum("version 2" in (r.refused or "") for r in room.heard()[1].values()) == 2, 60, "refusals")
    assert serving_versions(room) == {1}
    assert room.make("a four", seed=5)[1] == swapped

    blank = export(room.exports / "blank", seed=4, bias=1e4)
    ray.get(room.arbiter.publish.remote(Weights(version=3, uri=str(blank), stage=Stage.CANARY)))
    wait_until(lambda: refused_versions(room) == {3}, 60, "refusals")
    assert all("has one colour" in str(report.refused) for report in room.heard()[1].values())
    good = export(room.exports / "good", seed=5)
    ray.get(room.arbiter.publish.remote(Weights(version=4, uri=str(good), stage=Stage.CANARY)))
    wait_until(lambda: serving_versions(room) == {4} and len(room.heard()[1]) == 2, 60, "both replicas to swap")
    ray.get(room.arbiter.publish.remote(Weights(version=1, uri=str(second))))
    wait_until(lambda: serving_versions(room) == {1} and len(room.heard()[1]) == 2, 60, "both replicas to go back")
    assert room.make("a four", seed=5)[1] == swapped


def refused_versions(room: Room) -> set[int | None]:
    return {report.refused_version for report in room.heard()[1].values()}


def serving_versions(room: Room) -> set[int]:
    return {report.serving_version for report in room.heard()[1].values()}


def test_routing_goes_on_without_the_arbiter(room: Room) -> None:
    room.order(Spillway.OPEN, **{room.pool: 0})
    ray.kill(room.arbiter)
    for _ in range(5):
        assert room.make()[0] == "provider/stand-in"
    room.arbiter = ScriptedArbiter.options(name=ACTOR_NAME, namespace=NAMESPACE).remote()
    wait_until(lambda: room.heard()[0], 10, "the gateway to find the new arbiter")
    assert room.make()[0] == "provider/stand-in"  # the new one's orders are older: late, ignored
    room.order(Spillway.CLOSED)
    assert room.make()[0] == f"local/{room.pool}"


def test_every_request_ended_once(room: Room) -> None:
    """The last one: over all that happened above, the books agree."""
    folder = room.state_dir / "ledger"
    wait_until(lambda: read_totals(folder)["open"] == 0, 20, "no request to be open")
    totals = read_totals(folder)
    ends = ("local", "spilled", "refused", "cancelled", "failed")
    assert totals["sent"] == sum(totals[end] for end in ends)
    assert totals["failed"] == 0
    assert totals["cancelled"] == 1
    assert totals["refused"] == 3
    assert totals["local"] > 0
    assert totals["spilled"] > 0
    assert totals["compute_s"] > 0
    assert totals["canaries"] == 2
    assert totals["price_usd"] == pytest.approx(0.01 * (totals["spilled"] + totals["canaries"]))
