"""Asynchronous jobs over real HTTP, with gateways that are killed and come back."""

from __future__ import annotations

import base64
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from light import Light, running
from receiver import Receiver, receiving
from stand_in import StandIn

from tidegate.errors import PolicyError
from tidegate.serve.job_store import JobStore, KeyReusedError
from tidegate.serve.jobs import Job, JobStatus, startable
from tidegate.serve.webhooks import DELAY_MAX_S, delay_s, origin_of, secret_bytes
from tidegate.spec.load import parse_model
from tidegate.spec.policy import Policy
from waiting import wait_until

KEY, OTHER = "secret-of-acme-0123456789", "secret-of-other-0123456789"
WEBHOOK_SECRET = "whsec_" + base64.b64encode(b"signs all webhooks of acme").decode()
ENV = {"ACME": KEY, "OTHER": OTHER, "HOOK": WEBHOOK_SECRET}


def policy(origin: str = "http://127.0.0.1:1", **more: Any) -> dict[str, Any]:
    hooks = {"webhook_origins": [origin], "webhook_secret_env": "HOOK"}
    return {
        "serving": {"patience_s": 0.1, "request_deadline_s": 10.0},
        "jobs": {"lease_s": 1.0, "waiting_max": 20},
        "tenants": [
            {"name": "acme", "key_env": "ACME", "jobs_running_max": 2, **hooks},
            {"name": "other", "key_env": "OTHER"},
        ],
        **more,
    }


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Light]:
    with running(Light(tmp_path_factory.mktemp("jobs"), policy=policy(receiver.origin), env=ENV)) as gateway:
        yield gateway


def call(light: Light, method: str, path: str = "", key: str = KEY, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}", **more.pop("headers", {})}
    return httpx.request(method, f"{light.url}/v1/images/jobs{path}", headers=headers, timeout=20, **more)


def submit(light: Light, key: str = KEY, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = call(light, "POST", key=key, json={"prompt": "a two", **body}, headers=headers or {})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/v1/images/jobs/{answer.json()['id']}"
    return dict(answer.json())


def fetch(light: Light, job: dict[str, Any], key: str = KEY) -> dict[str, Any]:
    return dict(call(light, "GET", f"/{job['id']}", key).json())


def ended(light: Light, job: dict[str, Any], key: str = KEY) -> dict[str, Any]:
    wait_until(lambda: fetch(light, job, key)["ended_at"], 20, f"{job['id']} to end")
    return fetch(light, job, key)


def test_a_job_is_submitted_polled_and_fetched(light: Light) -> None:
    job = submit(light, n=2, seed=5, output_format="webp")
    assert (job["object"], job["answer"], job["error"]) == ("image.job", None, None)
    assert job["status"] in ("queued", "running")
    done = ended(light, job)
    assert (done["status"], done["backend"], done["computed_s"]) == ("succeeded", "local/pool-light", 0.02)
    assert done["created_at"] <= done["started_at"] <= done["ended_at"] < done["expires_at"]
    with light.client(KEY) as client:
        now = client.images.generate(prompt="a two", n=2, output_format="webp", extra_body={"seed": 5})
    assert [one["b64_json"] for one in done["answer"]["data"]] == [one.b64_json for one in now.data or []]
    assert (done["answer"]["output_format"], done["answer"]["seed"]) == ("webp", 5)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prompt": ""}, 400, "prompt"),
        ({"size": "17x17"}, 400, "size"),
        ({"model": "other"}, 404, "model"),
        ({"stream": True}, 400, "stream"),
        ({"webhook_uri": "x"}, 400, "webhook_uri"),
        ({"webhook_url": "https://169.254.169.254/latest"}, 400, "webhook_url"),
        ({"webhook_url": "file:///etc/passwd"}, 400, "webhook_url"),
    ],
)
def test_a_bad_job_is_refused_when_it_is_submitted(light: Light, body: dict[str, Any], status: int, param: str) -> None:
    answer = call(light, "POST", json={"prompt": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_jobs_are_their_callers_own(light: Light) -> None:
    job = submit(light)
    for method, path in (("GET", f"/{job['id']}"), ("POST", f"/{job['id']}/cancel"), ("GET", "/job-none")):
        answer = call(light, method, path, OTHER)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "job_not_found")
    assert call(light, "GET", key="a-wrong-key-0123456789").status_code == 401
    no_hooks = call(light, "POST", key=OTHER, json={"prompt": "x", "webhook_url": "https://example.com/"})
    assert no_hooks.json()["error"]["param"] == "webhook_url"


def test_a_list_goes_page_by_page_from_the_newest(light: Light) -> None:
    jobs = [submit(light, OTHER)["id"] for _ in range(3)]
    for job in jobs:
        ended(light, {"id": job}, OTHER)
    first = call(light, "GET", "?limit=2", OTHER).json()
    assert ([one["id"] for one in first["data"]], first["has_more"]) == ([jobs[2], jobs[1]], True)
    assert "answer" not in first["data"][0]
    rest = call(light, "GET", f"?limit=2&after={first['last_id']}&status=succeeded", OTHER).json()
    assert ([one["id"] for one in rest["data"]], rest["has_more"]) == ([jobs[0]], False)
    assert call(light, "GET", "?status=failed", OTHER).json()["data"] == []
    for query, param in (
        ("limit=0", "limit"),
        ("limit=x", "limit"),
        ("status=lost", "status"),
        ("after=job-x", "after"),
    ):
        answer = call(light, "GET", f"?{query}", OTHER)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_names_of_the_callers_own_users_are_not_kept(light: Light) -> None:
    ended(light, submit(light, user="jane-doe-of-acme", safety_identifier="jane-doe-hash"))
    for path in (light.folder / "state").rglob("*"):
        assert path.is_dir() or b"jane-doe" not in path.read_bytes(), path


def test_a_key_stands_for_one_job(light: Light) -> None:
    key = {"idempotency-key": "order-7"}
    job = submit(light, headers=key)
    assert submit(light, headers=key)["id"] == job["id"]
    assert call(light, "POST", json={"prompt": "y"}, headers=key).json()["error"]["code"] == "idempotency_key_reused"
    assert submit(light, OTHER, headers=key)["id"] != job["id"]


def test_a_webhook_is_signed_and_sent_until_it_is_taken(light: Light, receiver: Receiver) -> None:
    receiver.refuse = 1
    job = submit(light, webhook_url=f"{receiver.origin}/hook")
    wait_until(lambda: fetch(light, job)["webhook"]["delivered_at"], 20, "the webhook to be taken")
    assert fetch(light, job)["webhook"]["deliveries"] == 2
    (_, first), (headers, second) = receiver.got
    assert first == second
    assert headers["webhook-id"] == f"evt-{job['id']}" == json.loads(second)["id"]  # the same for both: once is enough
    assert json.loads(second)["data"] == {"id": job["id"], "status": "succeeded", "model": "tidegate-digits"}
    with light.client(KEY) as client:
        client.webhooks.verify_signature(second, headers, secret=WEBHOOK_SECRET)
        with pytest.raises(openai.InvalidWebhookSignatureError):
            client.webhooks.verify_signature(second + b" ", headers, secret=WEBHOOK_SECRET)


def test_of_one_caller_no_more_run_than_it_may_and_any_can_be_cancelled(tmp_path: Path) -> None:
    arguments = ("--replicas", "4", "--latency-s", "60")
    with running(Light(tmp_path, policy=policy(), env=ENV, arguments=arguments)) as gateway:
        jobs = [submit(gateway) for _ in range(3)]
        theirs = submit(gateway, OTHER)
        wait_until(lambda: fetch(gateway, theirs, OTHER)["status"] == "running", 10, "another caller's job to run")
        assert [fetch(gateway, job)["status"] for job in jobs] == ["running", "running", "backlogged"]
        stopped = call(gateway, "POST", f"/{jobs[0]['id']}/cancel").json()
        assert stopped["status"] == "cancelled"
        wait_until(lambda: fetch(gateway, jobs[2])["status"] == "running", 10, "the next one to run")
        last = submit(gateway)
        assert call(gateway, "POST", f"/{last['id']}/cancel").json()["status"] == "cancelled"
        assert call(gateway, "POST", f"/{last['id']}/cancel").json()["status"] == "cancelled"
        assert fetch(gateway, last)["started_at"] is None
        wait_until(lambda: "cancelled" in [row.outcome for row in gateway.rows().values()], 10, "the ledger's row")


def test_too_many_waiting_jobs_are_a_429(tmp_path: Path) -> None:
    settings = policy() | {"jobs": {"waiting_max": 1}}
    with running(Light(tmp_path, policy=settings, env=ENV, arguments=("--latency-s", "60"))) as gateway:
        jobs = [submit(gateway) for _ in range(2)]
        wait_until(lambda: all(fetch(gateway, job)["status"] == "running" for job in jobs), 10, "both to run")
        submit(gateway)
        full = call(gateway, "POST", json={"prompt": "x"})
        assert (full.status_code, full.headers["retry-after"]) == (429, "10")


def test_jobs_outlive_a_killed_gateway(tmp_path: Path, receiver: Receiver) -> None:
    """What ran runs again with the seed that was drawn for it, what waited goes on, and each end is told once."""
    light = Light(tmp_path, policy=policy(receiver.origin), env=ENV, arguments=("--latency-s", "60"))
    with running(light) as gateway:
        jobs = [submit(gateway, webhook_url=f"{receiver.origin}/after") for _ in range(3)]
        wait_until(lambda: fetch(gateway, jobs[1])["status"] == "running", 10, "jobs to run")
        with closing(sqlite3.connect(tmp_path / "state" / "jobs.sqlite")) as books:
            seeds = dict(books.execute("SELECT id, seed FROM jobs").fetchall())
        before = len(receiver.got)
        gateway.kill()
        gateway.arguments = ()
        gateway.start()
        done = [ended(gateway, job) for job in jobs]
        assert [job["status"] for job in done] == ["succeeded"] * 3
        assert {job["id"]: job["answer"]["seed"] for job in done} == seeds
        wait_until(lambda: len(receiver.got) == before + 3, 10, "three webhooks")


def test_a_stopped_gateway_gives_its_jobs_back_at_once(tmp_path: Path) -> None:
    settings = policy() | {"jobs": {"lease_s": 600.0}}
    with running(Light(tmp_path, policy=settings, env=ENV, arguments=("--latency-s", "60"))) as gateway:
        job = submit(gateway)
        wait_until(lambda: fetch(gateway, job)["status"] == "running", 10, "the job to run")
        gateway.stop()
        gateway.arguments = ()
        gateway.start()
        assert ended(gateway, job)["status"] == "succeeded"


def test_a_job_that_may_have_been_paid_is_not_bought_again(tmp_path: Path, stand_in: StandIn) -> None:
    """C160, over the death of the gateway: the provider had the request in hand, so its price may be owed."""
    stand_in.control(latency_s=3.0)
    settings = policy(providers=[stand_in.spec(timeout_s=20.0).model_dump(exclude_none=True)])
    with running(Light(tmp_path, policy=settings, env=ENV, arguments=("--replicas", "0"))) as gateway:
        before = stand_in.stats()["requests"]
        job = submit(gateway)
        wait_until(lambda: stand_in.stats()["requests"] == before + 1, 10, "the provider to be asked")
        gateway.kill()
        gateway.start()
        lost = ended(gateway, job)
        assert (lost["status"], lost["error"]["code"]) == ("failed", "answer_lost")
        assert stand_in.stats()["requests"] == before + 1
        stand_in.control(latency_s=0.02)
        assert ended(gateway, submit(gateway))["backend"] == "provider/stand-in"


def test_a_provider_that_clearly_made_nothing_may_be_asked_again(tmp_path: Path, stand_in: StandIn) -> None:
    stand_in.control(fault="status", status=500, times=1)
    settings = policy(providers=[stand_in.spec(cooldown_s=0.3).model_dump(exclude_none=True)])
    with running(Light(tmp_path, policy=settings, env=ENV, arguments=("--replicas", "0"))) as gateway:
        assert ended(gateway, submit(gateway))["status"] == "succeeded"


# --- the parts


def job(name: str, caller: str = "a", **more: Any) -> Job:
    fixed = {"priority": 0, "body": "{}", "model": "m", "seed": 1, "webhook_url": None, "created_at_s": 0.0}
    return Job(**{"id": name, "caller": caller, **fixed, **more})


def store(path: Path, owner: str) -> JobStore:
    return JobStore(path / "jobs.sqlite", owner, lease_s=5.0)


def test_two_gateways_never_hold_one_job(tmp_path: Path) -> None:
    one, two = store(tmp_path, "one"), store(tmp_path, "two")
    for name in ("x", "y", "z"):
        one.submit(job(name), 10, None, b"")
    assert [held.id for held in one.start(0.0, {}, free=1)] == ["x"]
    assert [held.id for held in two.start(0.0, {}, free=9)] == ["y", "z"]
    assert one.start(0.0, {}, free=9) == []
    assert not two.end("x", 1.0, JobStatus.SUCCEEDED)  # not its own
    assert one.renew(4.0) == set()
    assert two.recover(6.0, "lost") == 2  # its own hold was not renewed either
    assert [held.run for held in one.start(6.0, {}, free=1)] == [2]
    assert not two.buying("y", True)  # it may not pay for what is another one's by now
    assert two.recover(6.0, "lost") == 0


def test_a_key_in_the_store_outlives_its_gateway(tmp_path: Path) -> None:
    first = store(tmp_path, "one")
    first.submit(job("x"), 10, "k", b"1")
    first.close()
    again = store(tmp_path, "two")
    found = again.submit(job("y"), 10, "k", b"1")
    assert found is not None
    assert found.id == "x"
    with pytest.raises(KeyReusedError):
        again.submit(job("z"), 10, "k", b"2")


def test_old_jobs_are_forgotten_with_their_pictures(tmp_path: Path) -> None:
    books = store(tmp_path, "one")
    for name in ("x", "y", "hooked"):
        books.submit(job(name, webhook_url="https://h" if name == "hooked" else None), 10, None, b"")
    books.start(0.0, {}, free=9)
    books.end("x", 1.0, JobStatus.SUCCEEDED, answer="{}")
    books.end("hooked", 1.0, JobStatus.SUCCEEDED, answer="{}")
    books.forget(2.0)
    assert [books.find(name, "a") is None for name in ("x", "y", "hooked")] == [True, False, False]
    (due,) = books.due_deliveries(2.0, hold_s=10.0, most=9)
    assert books.due_deliveries(2.0, hold_s=10.0, most=9) == []  # held
    books.delivered(due.id, delivered_at_s=3.0, next_at_s=None)
    books.forget(2.0)
    assert books.find("hooked", "a") is None


@given(
    queued=st.lists(st.sampled_from("abc"), max_size=20),
    running_now=st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)),
    most=st.dictionaries(st.sampled_from("abc"), st.none() | st.integers(1, 3)),
    free=st.integers(0, 10),
)
def test_what_starts_keeps_every_limit_and_nobody_is_passed_over(
    queued: list[str], running_now: dict[str, int], most: dict[str, int | None], free: int
) -> None:
    jobs = [(str(number), caller) for number, caller in enumerate(queued)]
    chosen = startable(jobs, running_now, most, free)
    assert len(chosen) <= free
    for caller in "abc":
        mine = [name for name, whose in jobs if whose == caller]
        taken = [name for name in mine if name in chosen]
        assert taken == mine[: len(taken)]
        limit = most.get(caller)
        over = limit is not None and running_now.get(caller, 0) + len(taken) > limit
        assert not taken or not over
        blocked = limit is not None and running_now.get(caller, 0) + len(taken) >= limit
        assert len(taken) == len(mine) or len(chosen) == free or blocked


def test_deliveries_back_off() -> None:
    assert [delay_s(tried, 0.0) for tried in (1, 2, 3, 4)] == [1, 2, 4, 8]
    assert delay_s(1, 0.5) == 1.25
    assert delay_s(30, 0.0) == DELAY_MAX_S


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("https://h.example.com/a?b", "https://h.example.com"),
        ("http://h:80/", "http://h:80"),
        ("https://user@h/", None),
        ("https://h.example.com@evil.example/", None),
        ("ftp://h/", None),
        ("https://", None),
        ("https://h:port/", None),
        ("https://[::1", None),
        ("https://h/\n", None),
    ],
)
def test_where_a_webhook_goes(url: str, origin: str | None) -> None:
    assert origin_of(url) == origin


def test_webhook_settings_are_refused_by_name() -> None:
    tenant = "tenants:\n- {name: a, key_env: K, %s}\n"
    for more, said in (
        ("webhook_origins: ['https://h']", "webhook_origins needs webhook_secret_env or webhook_secret_file"),
        ("webhook_secret_env: S", "webhook_origins needs"),
        ("webhook_origins: ['https://h/path'], webhook_secret_env: S", "tenants[0].webhook_origins[0]"),
    ):
        with pytest.raises(PolicyError) as refused:
            parse_model(tenant % more, Policy)
        assert said in str(refused.value)
    with pytest.raises(PolicyError, match="is no base64"):
        secret_bytes("tenants.a.webhook_secret", "whsec_***")
    with pytest.raises(PolicyError, match=r"jobs\.lease: no such key"):
        parse_model("jobs: {lease: 5}\n", Policy)
