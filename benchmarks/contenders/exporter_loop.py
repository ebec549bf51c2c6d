"""The heat rule as it is run over an exporter: temperatures are collected every so often (dcgm-exporter: 30 s) and
shown as a page, which a watcher scrapes every so often; above the limit it kills the process on that GPU.

Its own process, since NVML's library belongs to one process each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tidegate.health.readings import Signal
from tidegate.health.sources.nvml import NvmlSource
from tidegate.ids import NodeId

NAME = "DCGM_FI_DEV_GPU_TEMP"


class Page(BaseHTTPRequestHandler):
    text = ""

    def do_GET(self) -> None:
        body = Page.text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return None


def collect(library: str, every_s: float) -> None:
    """Keep the page; each collection begins `every_s` after the last began."""
    source = NvmlSource(library, node=NodeId("exporter"))
    due_s = time.monotonic()
    while True:
        seen = source.read().readings
        Page.text = "".join(
            f'{NAME}{{UUID="{reading.subject}"}} {reading.value:g}\n'
            for reading in seen
            if reading.signal is Signal.GPU_TEMPERATURE and reading.value is not None
        )
        due_s += every_s
        time.sleep(max(due_s - time.monotonic(), 0.0))


def watch(url: str, every_s: float, limit_celsius: float, victims: Path) -> None:
    """Scrape the page; `victims`: a file of process ids by GPU, which may change."""
    due_s = time.monotonic()
    while True:
        with urllib.request.urlopen(url, timeout=every_s) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        pids = json.loads(victims.read_text(encoding="utf-8"))
        for sample in (sample for family in families for sample in family.samples):
            pid = pids.get(sample.labels["UUID"])
            if sample.value > limit_celsius and pid is not None:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue  # the page still shows what it was killed for
        due_s += every_s
        time.sleep(max(due_s - time.monotonic(), 0.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", required=True)
    parser.add_argument("--victims", type=Path, required=True)
    parser.add_argument("--limit", type=float, required=True)
    parser.add_argument("--collect-every", type=float, required=True)
    parser.add_argument("--scrape-every", type=float, required=True)
    arguments = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Thread(target=collect, args=(arguments.library, arguments.collect_every), daemon=True).start()
    print("up", flush=True)
    watch(f"http://127.0.0.1:{server.server_port}/", arguments.scrape_every, arguments.limit, arguments.victims)


if __name__ == "__main__":
    main()
