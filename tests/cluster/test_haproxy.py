"""`cluster.haproxy`: requests pass Serve's HAProxy instead of the Python proxy."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import psutil
import pytest
from staging import MODEL, ROOT, up, write_files

from tidegate.ports import free_port
from tidegate.testing.local_cluster import LocalCluster, Ports

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    cluster = LocalCluster(
        ports=Ports(gcs=free_port(), dashboard=free_port(), serve_http=free_port()),
        gpus_per_node=(1,),
        head_cpus=2,
        node_cpus=1,
        haproxy=True,
        environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    folder = tmp_path_factory.mktemp("haproxy")
    write_files(folder, cluster.ports.serve_http, {})
    with cluster:
        up(cluster, folder)
        yield f"http://127.0.0.1:{cluster.ports.serve_http}"


def test_requests_are_answered_through_haproxy(url: str) -> None:
    port = int(url.rpartition(":")[2])
    listening = [c for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port]
    assert {psutil.Process(connection.pid).name() for connection in listening} == {"haproxy"}

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    for _ in range(20):
        answer = client.images.with_raw_response.generate(model=MODEL, prompt="a three")
        assert answer.headers["x-tidegate-backend"].startswith("local/")
        assert answer.parse().data
    with pytest.raises(openai.NotFoundError) as unknown:  # our own errors arrive as they were sent
        client.images.generate(model="none", prompt="x")
    assert unknown.value.code == "model_not_found"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
