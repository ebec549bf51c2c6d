"""Whether a process still runs, seen without the package's own code."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    try:
        # The state follows the command, which stands in brackets; a zombie waits for its reaper only.
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or before it was read
        return False
