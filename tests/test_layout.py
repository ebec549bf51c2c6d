"""The house stands as docs/architecture.md draws it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tidegate.health.series import LABELS

REPOSITORY = Path(__file__).parents[1]


def test_no_module_lies_directly_in_platform() -> None:
    """It would shadow the standard library's `platform`, or be importable without the package."""
    assert [path.name for path in (REPOSITORY / "platform").iterdir() if path.suffix == ".py"] == []


def test_the_standard_platform_module_is_importable_from_the_root() -> None:
    code = "import platform; print(platform.system())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "Linux"


def test_jobs_and_serve_apps_are_not_imported_by_the_package() -> None:
    for path in (REPOSITORY / "platform").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "import jobs" not in text, path
        assert "from jobs" not in text, path
        assert "from serve_apps" not in text, path


def test_no_test_sleeps() -> None:
    """Tests wait for conditions, by `waiting.py`, or on a loop whose time costs none (`virtual_time.py`)."""
    for path in (REPOSITORY / "tests").rglob("*.py"):
        if path.name not in ("waiting.py", "virtual_time.py", Path(__file__).name):
            text = path.read_text(encoding="utf-8")
            assert "time.sleep(" not in text, path
            assert "asyncio.sleep(" not in text, path


def test_every_metric_is_on_its_page() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text(encoding="utf-8")
    found = set(LABELS)
    for path in (REPOSITORY / "platform").rglob("*.py"):
        found |= set(re.findall(r'(?:Gauge|Counter|Histogram)\(\s*"(\w+)"', path.read_text(encoding="utf-8")))
    assert len(found) >= 13
    assert found == set(re.findall(r"^\| `(\w+)`", page, flags=re.MULTILINE))
