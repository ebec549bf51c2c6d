"""schemathesis on our own specification: whatever it invents, the gateway does not fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from light import Light, running

from lacking import lacking
from tidegate.serve.api import ImagesBody


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Light]:
    with running(Light(tmp_path_factory.mktemp("openapi"), arguments=("--latency-s", "0"))) as gateway:
        yield gateway


def test_the_specification_lists_what_there_is(light: Light) -> None:
    spec = httpx.get(f"{light.url}/openapi.json").json()
    assert set(spec["paths"]) == {
        "/v1/images/generations",
        "/v1/images/jobs",
        "/v1/images/jobs/{job}",
        "/v1/images/jobs/{job}/cancel",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/ready",
    }
    body = spec["paths"]["/v1/images/generations"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(ImagesBody.model_fields)
    assert body["required"] == ["prompt"]


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_nothing_that_schemathesis_invents_is_our_fault(light: Light, mode: str) -> None:
    """Bodies, queries and paths that follow the specification, and such that don't: never a 5xx."""
    try:
        import schemathesis
    except ImportError:
        lacking("schemathesis is not installed")
    schema = schemathesis.openapi.from_url(f"{light.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    cases = [operation.as_strategy(schemathesis.GenerationMode(mode)) for operation in operations]
    statuses: Counter[int] = Counter()

    @settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.one_of(cases))
    def ask(case: Any) -> None:
        answer = case.call(timeout=10)
        statuses[answer.status_code] += 1
        assert answer.status_code < 500, answer.text

    ask()
    assert len(operations) == 9
    assert statuses[400] > 0
