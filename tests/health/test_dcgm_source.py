"""The dcgm-exporter source over real exporters' text, served over HTTP."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tidegate.health.readings import COUNTERS, Reading, Signal, Status
from tidegate.health.sources.dcgm import FIELDS, DcgmSource
from tidegate.ids import NodeId

SAMPLES = Path(__file__).parent / "samples"
T4 = "GPU-aaaaaaaa-0000-0000-0000-000000000000"


class Exporter:
    """An exporter that says what it is told to."""

    def __init__(self) -> None:
        self.text = ""
        self.status = 200
        self.silent = threading.Event()
        exporter = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if exporter.silent.is_set():
                    return
                body = exporter.text.encode()
                self.send_response(exporter.status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/metrics"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    exporter = Exporter()
    yield exporter
    exporter.server.shutdown()
    exporter.server.server_close()


@pytest.fixture
def source(exporter: Exporter, node: NodeId) -> Iterator[DcgmSource]:
    source = DcgmSource(exporter.url, node=node, timeout_s=2.0)
    yield source
    source.close()


def read(source: DcgmSource) -> dict[tuple[str, Signal], Reading]:
    return {(reading.subject, reading.signal): reading for reading in source.read().readings}


def xids(source: DcgmSource) -> list[float | None]:
    return [reading.value for reading in source.read().readings if reading.signal is Signal.GPU_XID]


def test_a_real_idle_t4_reads_in_our_units_and_has_no_memory_sensor(exporter: Exporter, source: DcgmSource) -> None:
    exporter.text = (SAMPLES / "dcgm-t4-drv460-idle.prom").read_text(encoding="utf-8")
    seen = read(source)
    assert seen[T4, Signal.GPU_TEMPERATURE].value == 25
    assert seen[T4, Signal.GPU_SM_CLOCK].value == 300e6
    assert seen[T4, Signal.GPU_POWER].value == pytest.approx(8.969)
    assert seen[T4, Signal.GPU_ENERGY].value == pytest.approx(128996.013)
    memory = seen.get((T4, Signal.GPU_MEMORY_TEMPERATURE))
    assert memory is None or memory.value is None, "0 °C is no temperature"
    assert (T4, Signal.GPU_XID) not in seen


@pytest.mark.parametrize(
    "text",
    ["140737488355328.0", "140737488355331.0", "9223372036854775794", "9223372036854775792", "2147483633", "NaN"],
)
@pytest.mark.parametrize("name", ["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_GPU_UTIL"])
def test_c105_c107_blanks_are_no_values(exporter: Exporter, source: DcgmSource, name: str, text: str) -> None:
    exporter.text = f'{name}{{gpu="0", UUID="GPU-x"}} {text}\n'
    reading = read(source)["GPU-x", FIELDS[name].signal]
    assert (reading.value, reading.status) == (None, Status.UNSUPPORTED)


@pytest.mark.parametrize("value", ["4294967295", "1200", "101", "-1"])
def test_c108_a_share_above_the_whole_is_no_value(exporter: Exporter, source: DcgmSource, value: str) -> None:
    exporter.text = f'DCGM_FI_DEV_GPU_UTIL{{UUID="GPU-x"}} {value}\n'
    assert read(source)["GPU-x", Signal.GPU_UTILIZATION].cause == "IMPLAUSIBLE"
    exporter.text = 'DCGM_FI_DEV_GPU_UTIL{UUID="GPU-x"} 35\n'
    assert read(source)["GPU-x", Signal.GPU_UTILIZATION].value == pytest.approx(0.35)


def test_c110_fields_that_an_upgrade_took_away_are_said_once_and_the_gpu_is_fine(
    exporter: Exporter, source: DcgmSource, caplog: pytest.LogCaptureFixture
) -> None:
    temperature = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-x"} 50\n'
    exporter.text = temperature + 'DCGM_FI_DEV_ROW_REMAP_FAILURE{UUID="GPU-x"} 0\n'
    read(source)
    exporter.text = temperature
    seen = [read(source), read(source)]
    assert [looked["GPU-x", Signal.GPU_TEMPERATURE].value for looked in seen] == [50, 50]
    assert ("GPU-x", Signal.GPU_ROW_FAILURE) not in seen[0], "missing, not 0"
    assert [line for line in caplog.messages if "ROW_REMAP_FAILURE" in line] == caplog.messages[:1]


def test_c111_a_stale_xid_is_no_new_one(exporter: Exporter, source: DcgmSource) -> None:
    story = []
    for code in (0, 0, 31, 31, 31, 62, 31):
        exporter.text = f'DCGM_FI_DEV_XID_ERRORS{{UUID="GPU-x"}} {code}\n'
        story.append(xids(source))
    assert story == [[], [], [31], [], [], [62], [31]]


def test_c111_the_second_of_two_equal_xids_shows_in_the_count(exporter: Exporter, source: DcgmSource) -> None:
    story = []
    for count in (None, 1, 1, 2, 1):
        line = f'DCGM_FI_DEV_XID_ERRORS_ACTIVE{{UUID="GPU-x",xid="42",window_size_in_ms="300000"}} {count}\n'
        exporter.text = "" if count is None else line
        story.append(xids(source))
    assert story == [[], [42], [], [42], []]


def test_an_xid_from_before_we_came_is_not_news_and_the_line_may_be_absent(
    exporter: Exporter, node: NodeId, source: DcgmSource
) -> None:
    exporter.text = 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-x"} 79\n'
    assert xids(source) == []
    late = DcgmSource(exporter.url, node=node)
    exporter.text = 'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-x"} 50\n'
    assert xids(late) == []
    exporter.text += 'DCGM_FI_DEV_XID_ERRORS{UUID="GPU-x"} 79\n'
    assert xids(late) == [79]
    late.close()


def test_c114_the_nvlink_total_is_a_rate_and_goes_down(exporter: Exporter, source: DcgmSource) -> None:
    rates = []
    for value in (16721, 24531, 24493, 12129):
        exporter.text = (
            "# TYPE DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL counter\n"
            f'DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{{UUID="GPU-x"}} {value}\n'
        )
        rates.append(read(source)["GPU-x", Signal.GPU_NVLINK_RATE].value)
    assert rates == [16721e6, 24531e6, 24493e6, 12129e6]
    assert Signal.GPU_NVLINK_RATE not in COUNTERS


def test_c116_throttled_time_is_nanoseconds(exporter: Exporter, source: DcgmSource) -> None:
    exporter.text = 'DCGM_FI_DEV_THERMAL_VIOLATION{UUID="GPU-x"} 5000000\n'
    assert read(source)["GPU-x", Signal.GPU_THROTTLED_SW_THERMAL].value == pytest.approx(0.005)


def test_c117_mig_instances_do_not_overwrite_each_other(exporter: Exporter, source: DcgmSource) -> None:
    exporter.text = "".join(
        f'DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{UUID="GPU-x",GPU_I_PROFILE="1g.6gb",GPU_I_ID="{i}"}} 0.{i}\n'
        f'DCGM_FI_DEV_GPU_TEMP{{UUID="GPU-x",GPU_I_PROFILE="1g.6gb",GPU_I_ID="{i}"}} 60\n'
        for i in (3, 5, 6)
    )
    seen = read(source)
    assert [seen[f"GPU-x/{i}", Signal.GPU_TENSOR_ACTIVE].value for i in (3, 5, 6)] == [0.3, 0.5, 0.6]
    assert seen["GPU-x", Signal.GPU_TEMPERATURE].value == 60, "the whole GPU's, said three times"


def test_c119_a_line_that_no_parser_reads_costs_only_itself(exporter: Exporter, source: DcgmSource) -> None:
    exporter.text = (
        'dcgm_nvlink_replay_error_count_total{gpu="0",UUID="GPU-x"}\n'
        'DCGM_FI_DEV_PCIE_REPLAY_COUNTER{UUID="GPU-x"} N/A161262243332996445\n'
        'DCGM_FI_DEV_GPU_TEMP{UUID="GPU-x"} 50\n'
    )
    seen = read(source)
    assert seen["GPU-x", Signal.GPU_TEMPERATURE].value == 50
    assert ("GPU-x", Signal.GPU_PCIE_REPLAYS) not in seen
    assert source.bad_lines == 2


def test_c120_names_and_labels_vary(exporter: Exporter, source: DcgmSource) -> None:
    lines = (SAMPLES / "dcgm-quirk-lines.txt").read_text(encoding="utf-8").splitlines()
    shown = [line.split("   ")[0].strip() for line in lines if line.lower().startswith("dcgm_")]
    exporter.text = (
        "\n".join(line for line in shown if "}" in line and "then" not in line and "TYPE" not in line) + "\n"
    )
    seen = read(source)
    assert seen["GPU-X", Signal.GPU_UTILIZATION].value == 0, "dcgm_gpu_utilization"
    assert seen["GPU-X", Signal.GPU_SM_CLOCK].value == 1335e6
    assert seen["GPU-X/6", Signal.GPU_MEMORY_USED].value == 3744 * 2**20
    assert seen["GPU-X", Signal.GPU_TENSOR_ACTIVE].value == pytest.approx(0.92926)
    assert seen["GPU-X", Signal.GPU_MEMORY_TEMPERATURE].value is None


def test_a_row_without_a_uuid_is_nobodys(exporter: Exporter, source: DcgmSource) -> None:
    exporter.text = 'DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID=""} 90\nDCGM_FI_DEV_GPU_TEMP{gpu="0"} 90\n'
    assert list(read(source)) == [(source.read().readings[0].subject, Signal.DCGM_ANSWERS)]


def test_no_exporter_a_silent_one_and_a_broken_one_are_told_apart(
    exporter: Exporter, node: NodeId, source: DcgmSource
) -> None:
    exporter.status = 503
    (answers,) = source.read().readings
    assert (answers.value, answers.status) == (None, Status.STALE)
    absent = DcgmSource("http://127.0.0.1:9/metrics", node=node)
    assert [(r.status, r.cause) for r in absent.read().readings] == [(Status.UNSUPPORTED, "NO_EXPORTER")]
    absent.close()
    exporter.silent.set()
    assert all(reading.value is None for reading in source.read().readings)


def test_what_a_stock_exporter_exports_of_health_is_known() -> None:
    with (SAMPLES / "dcgm-default-counters.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row and not row[0].strip().startswith("#")]
    unknown = {row[0] for row in rows} - FIELDS.keys()
    assert not {name for name in unknown if "REMAP" in name or "TEMP" in name or "TENSOR" in name or "REPLAY" in name}
