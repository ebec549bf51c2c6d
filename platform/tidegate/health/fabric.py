"""Whether GPUs and network cards can reach each other without going through the CPU, as far as a machine tells it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

LSPCI_DEADLINE_S = 20.0
_DEVICE = re.compile(r"^([0-9a-f:.]+) (.*)$")
_REDIRECTS = ("ReqRedir+", "CmpltRedir+")
"""PCIe's Access Control Services: peer-to-peer requests, or their answers, go up to the root and its IOMMU."""


def peer_memory(root: Path) -> tuple[bool, str]:
    """Whether a network card can register a GPU's memory, and by what. `root`: where proc/ and sys/ lie.

    By the module nvidia_peermem, or by dma-buf, which NVIDIA's open kernel modules offer (GPU Operator's documentation
    on GPUDirect RDMA).
    """
    if (root / "sys/module/nvidia_peermem").exists():
        return True, "nvidia_peermem is loaded"
    try:
        version = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False, "no nvidia_peermem, and no NVIDIA driver that tells its version"
    if "Open Kernel Module" in version:
        return True, "dma-buf, by the open kernel modules"
    return False, "no nvidia_peermem, and the closed kernel modules have no dma-buf"


def is_virtual(root: Path) -> bool:
    """Whether this is a guest: its PCIe is the host's business, and ACS has to be on for it."""
    try:
        text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    # ARM has no such flag; its firmware names the machine.
    try:
        product = (root / "sys/class/dmi/id/product_name").read_text(encoding="utf-8", errors="replace").lower()
    except OSError:
        product = ""
    guest = any(word in product for word in ("virtual", "kvm", "qemu", "vmware", "compute engine"))
    return "hypervisor" in flags.split() or guest or (root / "sys/hypervisor/type").exists()


def redirecting(text: str) -> list[str]:
    """PCI bridges on which ACS sends peer traffic up to the root. `text`: what `lspci -vvv` prints."""
    found, bridge = [], ""
    for line in text.splitlines():
        device = _DEVICE.match(line)
        if device is not None:
            bridge = device[1] if "bridge" in device[2] else ""
        elif bridge and "ACSCtl:" in line and any(word in line for word in _REDIRECTS):
            found.append(bridge)
    return found


def bridges(root: Path = Path("/"), program: str | None = None) -> tuple[bool | None, str]:
    """Whether peer traffic takes the short way (None: that can't be told), and why. `program`: lspci's path."""
    if is_virtual(root):
        return None, "a virtual machine: ACS is its host's business"
    program = program or shutil.which("lspci")
    if program is None:
        return None, "lspci is not installed (package pciutils)"
    try:
        done = subprocess.run(
            [program, "-vvv"], capture_output=True, text=True, errors="replace", timeout=LSPCI_DEADLINE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"lspci: {error}"
    if "ACSCtl:" not in done.stdout:
        return None, "lspci tells nothing of ACS; it does to root"
    where = redirecting(done.stdout)
    if where:
        return False, f"ACS redirects peer traffic on {', '.join(where[:8])}" + (" …" if len(where) > 8 else "")
    return True, "no bridge redirects peer traffic"


def fabric_manager(root: Path) -> tuple[bool | None, str] | None:
    """Whether the machine's fabric manager runs (its first None: that can't be told); None where the machine has no
    NVSwitch of its own to manage."""
    if not any(_switches(root)):
        return None
    if _program(root / "proc/2") != "kthreadd":
        return None, "a container, from which the host's processes can't be seen"
    if any(_program(process).startswith("nv-fabricmanage") for process in (root / "proc").glob("[0-9]*")):
        return True, "nv-fabricmanager runs"
    return False, "no nv-fabricmanager runs"


def _program(process: Path) -> str:
    """The name of its program, of which the kernel keeps 15 characters; empty where it has ended."""
    try:
        return (process / "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _switches(root: Path) -> Iterator[Path]:
    """NVIDIA's PCI devices of class "bridge, other": NVSwitches."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text(encoding="ascii").strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor == "0x10de" and kind.startswith("0x0680"):
            yield device
