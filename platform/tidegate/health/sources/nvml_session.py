"""This process' session with the driver. NVML counts its users, so several sources may hold one at the same time."""

from __future__ import annotations

import ctypes
import logging

import pynvml

from tidegate.health.sources.nvml_values import cause_of

logger = logging.getLogger(__name__)


class OtherLibraryError(Exception):
    """pynvml works on a library that is not the one we were told to use."""


def connect(library: str | None) -> None:
    """Begin to use the driver. `library`: path of libnvidia-ml.so.1; None = the loader finds it.

    Raises:
        pynvml.NVMLError: the driver's own word.
        OSError: there is no such library.
        OtherLibraryError: another one is loaded already, and stays for as long as this process lives.
    """
    ours = None
    if library is not None:
        # pynvml asks the loader for "libnvidia-ml.so.1": the loader gives it the one that is mapped by that name.
        ours = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    pynvml.nvmlInit()
    if ours is not None and pynvml.nvmlLib._handle != ours._handle:
        disconnect()
        raise OtherLibraryError(f"this process had loaded another libnvidia-ml.so.1 before {library}")


def disconnect() -> None:
    """One user less."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        # The driver is gone already; there is nothing left to close.
        logger.info("NVML: shutdown says %s", cause_of(error))
