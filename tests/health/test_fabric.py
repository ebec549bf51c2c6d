"""GPUs and network cards side by side: what a machine's own files and lspci tell of the way between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidegate.health import fabric

# As pciutils 3.9 prints it on an HGX board: a switch's downstream port, a GPU behind it, a root port.
LSPCI = """\
17:00.0 PCI bridge: Broadcom / LSI PEX890xx PCIe Gen 5 Switch (rev b0) (prog-if 00 [Normal decode])
\tCapabilities: [f24 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- {0} UpstreamFwd- EgressCtrl- DirectTrans-
18:00.0 3D controller: NVIDIA Corporation GH100 [H100 SXM5 80GB] (rev a1)
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
00:01.0 PCI bridge: Intel Corporation Device 352a (rev 30) (prog-if 00 [Normal decode])
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
"""
OFF, ON = "ReqRedir- CmpltRedir-", "ReqRedir+ CmpltRedir+"


def lspci(folder: Path, text: str) -> str:
    program = folder / "lspci"
    (folder / "text").write_text(text)
    program.write_text(f"#!/bin/sh\ncat {folder / 'text'}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(("words", "where"), [(OFF, []), (ON, ["17:00.0"]), ("ReqRedir- CmpltRedir+", ["17:00.0"])])
def test_only_bridges_that_redirect_are_named(words: str, where: list[str]) -> None:
    assert fabric.redirecting(LSPCI.format(words)) == where


def test_acs_is_judged_where_it_can_be_read_and_on_bare_metal(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu vme avx2\n")
    assert fabric.bridges(tmp_path, lspci(tmp_path, LSPCI.format(OFF))) == (True, "no bridge redirects peer traffic")
    good, text = fabric.bridges(tmp_path, lspci(tmp_path, LSPCI.format(ON)))
    assert good is False
    assert "17:00.0" in text
    # As it prints to who is not root.
    assert (
        fabric.bridges(tmp_path, lspci(tmp_path, "17:00.0 PCI bridge: x\n\tCapabilities: <access denied>\n"))[0] is None
    )
    assert fabric.bridges(tmp_path, str(tmp_path / "none"))[0] is None
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu hypervisor avx2\n")
    assert fabric.bridges(tmp_path, lspci(tmp_path, LSPCI.format(ON)))[0] is None
    (tmp_path / "proc/cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert fabric.bridges(tmp_path, lspci(tmp_path, LSPCI.format(ON)))[0] is False
    (tmp_path / "sys/class/dmi/id").mkdir(parents=True)
    (tmp_path / "sys/class/dmi/id/product_name").write_text("KVM Virtual Machine\n")
    assert fabric.bridges(tmp_path, lspci(tmp_path, LSPCI.format(ON)))[0] is None


def test_peer_memory_by_module_or_by_dma_buf(tmp_path: Path) -> None:
    assert fabric.peer_memory(tmp_path) == (False, "no nvidia_peermem, and no NVIDIA driver that tells its version")
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.90.07  Fri May 31\n")
    assert not fabric.peer_memory(tmp_path)[0]
    (tmp_path / "sys/module/nvidia_peermem").mkdir(parents=True)
    assert fabric.peer_memory(tmp_path) == (True, "nvidia_peermem is loaded")
    (tmp_path / "sys/module/nvidia_peermem").rmdir()
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert fabric.peer_memory(tmp_path)[0]


def test_a_fabric_manager_is_needed_where_there_are_switches(tmp_path: Path) -> None:
    device, process = tmp_path / "sys/bus/pci/devices/0000:07:00.0", tmp_path / "proc/71"
    device.mkdir(parents=True)
    process.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    (process / "comm").write_text("bash\n")
    assert fabric.fabric_manager(tmp_path) is None
    (device / "class").write_text("0x068000\n")
    told = fabric.fabric_manager(tmp_path)
    assert told is not None
    assert told[0] is None, "a container: the host's processes can't be seen"
    kernel = tmp_path / "proc/2"
    kernel.mkdir()
    (kernel / "comm").write_text("kthreadd\n")
    assert fabric.fabric_manager(tmp_path) == (False, "no nv-fabricmanager runs")
    (process / "comm").write_text("nv-fabricmanage\n")
    assert fabric.fabric_manager(tmp_path) == (True, "nv-fabricmanager runs")
