"""Keys, limits and repeats, over real HTTP; and what a settings file may say of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from light import MODEL, Light, running
from stand_in import StandIn
from starlette.responses import Response

from tidegate.errors import PolicyError
from tidegate.serve.api import ApiError
from tidegate.serve.callers import Callers
from tidegate.serve.repeats import KEEP_BYTES, KEEP_S, Repeats
from tidegate.spec.load import parse_model
from tidegate.spec.policy import Policy
from tidegate.spec.tenants import TenantSpec
from waiting import others_first, wait_until

KEYS = {name: f"secret-of-{name}-0123456789" for name in ("acme", "slow", "one", "home", "gone", "bulk")}


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory, stand_in_process: StandIn) -> Iterator[Light]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "acme.keys").write_text(f"{KEYS['acme']}\nthe-next-key-of-acme-1\n")
    rest = [{"name": name, "key_env": f"KEY_{name.upper()}"} for name in KEYS if name != "acme"]
    more: dict[str, dict[str, Any]] = {
        "slow": {"requests_per_min": 2},
        "one": {"concurrent_max": 1},
        "home": {"local_only": True},
        "gone": {"suspended": True},
        "bulk": {"priority": "batch"},
    }
    policy = {
        "serving": {"patience_s": 0.2, "request_deadline_s": 2.0},
        "tenants": [
            {"name": "acme", "key_file": str(folder / "acme.keys")},
            *(tenant | more[tenant["name"]] for tenant in rest),
        ],
        "providers": [stand_in_process.spec().model_dump(exclude_none=True)],
    }
    env = {f"KEY_{name.upper()}": key for name, key in KEYS.items()}
    with running(Light(folder, policy=policy, env=env, arguments=("--replicas", "0"))) as gateway:
        yield gateway


def ask(light: Light, tenant: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEYS[tenant]}", **more.pop("headers", {})}
    body = {"prompt": "x", **more}
    return httpx.post(f"{light.url}/v1/images/generations", json=body, headers=headers, timeout=20)


def test_a_key_opens(light: Light, stand_in: StandIn) -> None:
    for key in (KEYS["acme"], "the-next-key-of-acme-1"):  # two while one is being changed
        with light.client(key) as client:
            assert client.images.generate(model=MODEL, prompt="x").data
            assert client.models.list().data


def test_no_key_a_wrong_one_and_a_suspended_one(light: Light) -> None:
    with light.client("a-wrong-key-0123456789") as client:
        with pytest.raises(openai.AuthenticationError) as wrong:
            client.images.generate(model=MODEL, prompt="x")
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
    assert (wrong.value.code, wrong.value.type) == ("invalid_api_key", "authentication_error")
    missing = httpx.post(f"{light.url}/v1/images/generations", json={"prompt": "x"})
    assert (missing.status_code, missing.headers["www-authenticate"]) == (401, "Bearer")
    with light.client(KEYS["gone"]) as client, pytest.raises(openai.PermissionDeniedError) as gone:
        client.images.generate(model=MODEL, prompt="x")
    assert gone.value.code == "key_suspended"
    assert httpx.get(f"{light.url}/ready").status_code == 200  # a probe has no key


def test_too_many_a_minute(light: Light, stand_in: StandIn) -> None:
    answers = [ask(light, "slow") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert 25 <= int(answers[2].headers["retry-after"]) <= 30
    assert ask(light, "acme").status_code == 200  # one caller's limit is nobody else's


def test_too_many_at_a_time(light: Light, stand_in: StandIn) -> None:
    stand_in.control(latency_s=0.3)

    async def both() -> list[int]:
        headers = {"authorization": f"Bearer {KEYS['one']}"}
        async with httpx.AsyncClient(base_url=light.url, headers=headers, timeout=20) as client:
            posts = (client.post("/v1/images/generations", json={"prompt": "x"}) for _ in range(2))
            return sorted(answer.status_code for answer in await asyncio.gather(*posts))

    assert asyncio.run(both()) == [200, 429]
    assert ask(light, "one").status_code == 200  # the first has given its place back


def test_a_tenant_that_stays_at_home_never_leaves(light: Light, stand_in: StandIn) -> None:
    before = stand_in.stats()["requests"]
    refused = ask(light, "home", local_only=False)
    assert refused.status_code == 503
    assert stand_in.stats()["requests"] == before


def test_a_repeat_is_made_once(light: Light, stand_in: StandIn) -> None:
    """C160: one logical request, however often it is sent."""
    before = stand_in.stats()["answered"]
    key = {"idempotency-key": "order-1"}
    first, again = (ask(light, "acme", headers=key) for _ in range(2))
    assert again.content == first.content
    assert again.headers["x-tidegate-request-id"] == first.headers["x-tidegate-request-id"]
    assert "x-tidegate-replayed" not in first.headers
    assert again.headers["x-tidegate-replayed"] == "true"
    assert ask(light, "bulk", headers=key).headers.get("x-tidegate-replayed") is None  # another caller's key
    other = ask(light, "acme", headers=key, prompt="y")
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    assert ask(light, "acme", headers={"idempotency-key": "k" * 256}).status_code == 400
    assert stand_in.stats()["answered"] == before + 2


def test_a_repeat_of_what_was_paid_and_lost_buys_nothing(light: Light, stand_in: StandIn) -> None:
    """C160: the answer was lost, and asking again under the same key is told so again."""
    stand_in.control(fault="drop", times=1)
    before = stand_in.stats()["requests"]
    first, again = (ask(light, "acme", headers={"idempotency-key": "order-2"}) for _ in range(2))
    assert (first.status_code, again.status_code) == (504, 504)
    assert first.headers["x-should-retry"] == "false"
    assert stand_in.stats()["requests"] == before + 1


def test_no_key_is_written_anywhere(light: Light) -> None:
    wait_until(lambda: all(row.outcome for row in light.rows().values()), 10, "the ledger's rows")
    written = [path for path in light.folder.rglob("*") if path.is_file() and path.suffix != ".keys"]
    assert any(path.suffix == ".sqlite" for path in written)
    for path in written:
        for key in (*KEYS.values(), "a-wrong-key-0123456789"):
            assert key.encode() not in path.read_bytes(), path


def tenant(**more: Any) -> TenantSpec:
    return TenantSpec(**{"name": "acme", "key_env": "KEY", **more})


@pytest.mark.parametrize(
    ("tenants", "environ", "said"),
    [
        ((tenant(),), {}, "tenants.acme.key_env: the environment variable KEY is empty or not set"),
        ((tenant(),), {"KEY": "short"}, "at least 16 characters"),
        ((tenant(key_env=None, key_file="/nowhere/key"),), {}, "tenants.acme.key_file: /nowhere/key: cannot be read"),
        ((tenant(), tenant(name="b")), {"KEY": "0123456789abcdef"}, "tenants.b.key: the same key as of tenant 'acme'"),
    ],
)
def test_a_gateway_does_not_start_with_half_its_keys(
    tenants: tuple[TenantSpec, ...], environ: dict[str, str], said: str
) -> None:
    with pytest.raises(PolicyError) as refused:
        Callers(tenants, environ)
    assert said in str(refused.value)
    assert not any(secret in str(refused.value) for secret in environ.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tenants:\n- {name: a, key: xyz}\n", "tenants[0].key: no such key"),
        ("tenants:\n- {name: a}\n", "policy.yaml:2: tenants[0]: tenant 'a' needs either key_env or key_file"),
        ("tenants:\n- {name: A b, key_env: K}\n", "tenants[0].name"),
        ("tenants:\n- {name: a, key_env: K, requests_per_min: 0}\n", "tenants[0].requests_per_min"),
        ("tenants:\n- {name: a, key_env: K, priority: first}\n", "tenants[0].priority"),
        ("tenants:\n- {name: a, key_env: K}\n- {name: a, key_env: L}\n", "tenants must have different names"),
    ],
)
def test_settings_are_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(PolicyError) as refused:
        parse_model(text, Policy)
    assert said in str(refused.value)


def test_only_the_whole_key_of_the_right_scheme_counts() -> None:
    callers = Callers((tenant(),), {"KEY": "0123456789abcdef"})
    assert callers.identify("bearer 0123456789abcdef").name == "acme"
    for wrong in (
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic 0123456789abcdef",
        "Bearer 0123456789abcde",
        "0123456789abcdef",
    ):
        with pytest.raises(ApiError) as refused:
            callers.identify(wrong)
        assert refused.value.status == 401
    assert "0123456789abcdef" not in repr(callers) + repr(callers.identify("Bearer 0123456789abcdef"))


class Work:
    """Answers of a given size, counted; each waits for `go`."""

    def __init__(self, size_bytes: int = 1) -> None:
        self.size_bytes, self.times, self.go = size_bytes, 0, asyncio.Event()

    async def __call__(self) -> Any:
        self.times += 1
        await self.go.wait()
        return Response(b"x" * self.size_bytes)


def test_work_under_a_key_goes_on_without_its_client() -> None:
    async def story() -> None:
        repeats, work = Repeats(), Work()
        first = asyncio.create_task(repeats.once("a", "k", b"", lambda: 0.0, work))
        await others_first()
        first.cancel()
        second = asyncio.create_task(repeats.once("a", "k", b"", lambda: 0.0, work))
        await others_first()
        work.go.set()
        assert (await second).body == b"x"
        assert work.times == 1

    asyncio.run(story())


def test_answers_are_kept_for_a_while_and_not_without_bound() -> None:
    async def story() -> None:
        repeats, work, now_s = Repeats(), Work(KEEP_BYTES // 3), 0.0
        work.go.set()
        for key in "abcd":  # the fourth pushes out the first
            await repeats.once("me", key, b"", lambda: now_s, work)
        await repeats.once("me", "d", b"", lambda: now_s, work)
        assert work.times == 4
        await repeats.once("me", "a", b"", lambda: now_s, work)
        assert work.times == 5
        now_s = KEEP_S
        await repeats.once("me", "d", b"", lambda: now_s, work)
        assert work.times == 6

    asyncio.run(story())
