"""What an agent's standing verdicts outlive: its own process, but not the machine's boot."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from tidegate.health.history import History, Stored

logger = logging.getLogger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Remembered(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    boot_id: str
    history: Stored


class FileMemory:
    """One file on the node. A reboot lifts what is latched; what was taken out how often is known beyond it."""

    def __init__(self, path: Path, boot_id: str | None = None) -> None:
        self._path = path
        self._boot_id = boot_id if boot_id is not None else _BOOT_ID.read_text(encoding="ascii").strip()

    def left_behind(self) -> tuple[History, bool] | None:
        """What the agent remembered that was here before this one, and whether the machine was booted since; None where
        this one has a memory of its own. A Ray node that is started anew has another id; its GPUs haven't."""
        if self._path.exists():
            return None
        others = sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in others:
            try:
                remembered = _Remembered.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            return remembered.history.history(), remembered.boot_id != self._boot_id
        return None

    def load(self) -> History:
        try:
            remembered = _Remembered.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return History()
        except (OSError, ValidationError) as error:
            # A fault that is still there is found again within a few looks; an agent that can't start finds none.
            logger.warning("health: %s can't be read, starting without it: %s", self._path, error)
            return History()
        history = remembered.history.history()
        return history if remembered.boot_id == self._boot_id else history.after_reboot()

    def save(self, history: History) -> None:
        text = _Remembered(boot_id=self._boot_id, history=history.stored()).model_dump_json()
        half = self._path.with_name(self._path.name + ".half")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(text, encoding="utf-8")
            half.replace(self._path)
        except OSError as error:
            # A full or read-only disk must not silence the agent; what is lost is only what a restart would know.
            logger.warning("health: %s can't be written: %s", self._path, error)
