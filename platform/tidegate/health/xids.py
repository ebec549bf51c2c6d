"""NVIDIA's XIDs as rules (specification 4.2). `docs/health-rules.md` shows them all."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.arbiter.messages import Action, When
from tidegate.health.conditions import Xid
from tidegate.health.readings import Signal
from tidegate.health.rule import Rule
from tidegate.ids import Tier

DAY_S = 86_400.0
_CLEAN_S = 1800.0
"""So long without another one, and a GPU that answers: then it may come back (C147)."""
_SAME_EVENT_S = 5.0
"""The event set and the kernel log tell of one XID twice; so does an agent that starts anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidRow:
    name: str
    codes: frozenset[int]
    what: str
    nvidia: str
    """What NVIDIA's catalogue says to do."""
    first: tuple[Action, When, Tier] | None
    """None = nothing."""
    repeated: tuple[int, float, Action, When] | None = None
    """So many within so many seconds."""
    text: str | None = None
    no_text: bool = False
    same: str | None = None
    lifted_by: frozenset[int] = frozenset()
    excused_by: frozenset[str] = frozenset()
    fix: str = ""


_WARN = (Action.WARN, When.NOW, Tier.GANG)
_NODE_NOW = (Action.EVICT_NODE, When.NOW, Tier.NONE)
_NODE_LATER = (Action.EVICT_NODE, When.NEXT_CHECKPOINT, Tier.NONE)
_GPU_TWICE_A_DAY = (2, DAY_S, Action.EVICT_GPU, When.NOW)
_RESET = "reset the GPU (all of its NVLink group idle) or reboot, then `tidegate pardon` it"
_RMA = "replace the GPU: its spare rows are used up"


def _row(name: str, codes: tuple[int, ...], what: str, nvidia: str, first: object, **more: object) -> XidRow:
    return XidRow(name=name, codes=frozenset(codes), what=what, nvidia=nvidia, first=first, **more)  # type: ignore[arg-type]


XIDS: tuple[XidRow, ...] = (
    _row(
        "xid_app",
        (8, 11, 32, 69, 80, 126, 131),
        "bad command stream, app class",
        "RESTART_APP",
        _WARN,
        repeated=_GPU_TWICE_A_DAY,
    ),
    # Usually the program; one and the same place on the chip three times in a day is the chip (C146).
    _row(
        "xid_engine",
        (13,),
        "engine exception",
        "RESTART_APP",
        _WARN,
        repeated=_GPU_TWICE_A_DAY,
        same=r"(GPC \d+, TPC \d+)",
    ),
    _row("xid_page_fault", (31,), "page fault", "RESTART_APP", _WARN, repeated=_GPU_TWICE_A_DAY),
    _row("xid_firmware", (38,), "firmware error", "IGNORE / support", _WARN),
    _row("xid_app_stopped", (43,), "app stopped", "IGNORE", None),
    _row("xid_context_fault", (44,), "context switch fault", "IGNORE / support", _WARN, repeated=_GPU_TWICE_A_DAY),
    _row(
        "xid_cleanup",
        (45,),
        "cleanup after another fault; alone it is odd",
        "IGNORE",
        _WARN,
        excused_by=frozenset({"any_xid"}),
    ),
    _row("xid_stopped", (46,), "GPU stopped", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row(
        "xid_double_bit",
        (48,),
        "double-bit ECC error",
        "WORKFLOW_48",
        (Action.EVICT_GPU, When.NOW, Tier.NONE),
        fix=_RESET,
    ),
    _row(
        "xid_aux_power",
        (54,),
        "auxiliary power missing",
        "CHECK_MECHANICALS",
        _NODE_NOW,
        fix="a person checks the power cables",
    ),
    _row("xid_microcontroller", (61, 62), "microcontroller halt", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row(
        "xid_row_remap",
        (63,),
        "row remapping recorded",
        "IGNORE (reset at leisure)",
        (Action.EVICT_GPU, When.NEXT_CHECKPOINT, Tier.SERVE),
        fix=_RESET,
    ),
    _row("xid_row_remap_failed", (64,), "row remapping failed", "RESET_GPU / support", _NODE_NOW, fix=_RMA),
    _row("xid_note", (66, 93, 137, 141, 157, 160, 161), "informational", "IGNORE", _WARN),
    _row("xid_video", (68,), "video decoder", "RESTART_APP", _WARN),
    _row("xid_nvlink", (74,), "NVLink error", "NVLINK workflow", _NODE_NOW, fix=_RESET),
    _row("xid_vgpu", (78,), "vGPU start", "UPDATE_SWFW", _NODE_LATER, fix="update driver or firmware"),
    _row("xid_off_the_bus", (79,), "fallen off the bus", "RESTART_BM", _NODE_NOW, fix="reboot the machine"),
    _row("xid_single_bits", (92,), "high rate of single-bit errors", "IGNORE / support", _WARN),
    _row("xid_contained", (94,), "contained memory error", "RESTART_APP", _WARN, repeated=_GPU_TWICE_A_DAY),
    _row("xid_uncontained", (95,), "uncontained memory error", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row("xid_switch_timeout", (109,), "context switch timeout", "RESET_GPU", _WARN, repeated=_GPU_TWICE_A_DAY),
    _row("xid_fatal", (110, 143, 158), "security, initialisation or fatal timeout", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row("xid_gsp", (119, 120), "GSP timeout or error", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row(
        "xid_c2c",
        (121,),
        "chip-to-chip link",
        "IGNORE / support",
        _WARN,
        repeated=(3, 3600.0, Action.EVICT_NODE, When.NOW),
    ),
    _row("xid_link_training", (136,), "link training failed", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row("xid_unrecovered_ecc", (140,), "unrecovered ECC error", "RESET_GPU", _NODE_NOW, fix=_RESET),
    _row(
        "xid_nvlink5_fatal",
        tuple(range(144, 151)),
        "NVLink 5, fatal",
        "NVLINK5 workflow",
        _NODE_NOW,
        text=r"\bFatal\b",
        fix=_RESET,
    ),
    _row(
        "xid_nvlink5_nonfatal",
        tuple(range(144, 151)),
        "NVLink 5, not fatal",
        "NVLINK5 workflow",
        _WARN,
        text=r"\bNonfatal\b",
    ),
    # The recovery action (row 14) decides sooner and harder where the driver has one.
    _row(
        "xid_nvlink5",
        tuple(range(144, 151)),
        "NVLink 5, from the event set alone",
        "NVLINK5 workflow",
        _NODE_LATER,
        no_text=True,
        fix=_RESET,
    ),
    _row("xid_keys", (151,), "key rotation", "RESTART_VM", _NODE_LATER, fix="restart the machine"),
    _row(
        "xid_recovery_now",
        (154,),
        "recovery action changed to a reset or reboot",
        "informational",
        _NODE_NOW,
        text=r"to 0x\w+ \((?:GPU Reset|Node Reboot|System Reboot|Bus Reset)",
        fix=_RESET,
    ),
    _row(
        "xid_recovery_drain",
        (154,),
        "recovery action changed to a drain",
        "informational",
        _NODE_LATER,
        text=r"to 0x\w+ \(Drain",
        fix=_RESET,
    ),
    _row("xid_nvlink_software", (155, 156), "NVLink software, retirement", "RESET_GPU", _NODE_LATER, fix=_RESET),
    # 162 says that power smoothing is back: it takes 163's warning away and leaves all others alone (C153).
    _row("xid_power_smoothing", (163,), "power smoothing off", "-", _WARN, lifted_by=frozenset({162})),
    _row("xid_various", (164, 165, 166, 168, 170, 173), "confidential computing, protected memory", "-", _WARN),
    _row("xid_pcie_fatal", (167, 169), "PCIe fatal timeout, microcontroller halt", "-", _NODE_NOW, fix=_RESET),
    _row("xid_details_of_48", (162, 171, 172), "details of other XIDs", "-", None),
)
_KNOWN = frozenset(code for row in XIDS for code in row.codes)


def xid_rules() -> tuple[Rule, ...]:
    """One rule for what the first of a kind means, one for what its repetition means."""
    rules = [rule for row in XIDS for rule in _rules(row)]
    unknown = XidRow(
        name="xid_unknown", codes=frozenset(), what="not in the table", nvidia="CONTACT_SUPPORT", first=_WARN,
        repeated=(2, 3600.0, Action.EVICT_NODE, When.NEXT_CHECKPOINT),
    )  # fmt: skip
    return (*rules, *_rules(unknown))


def _rules(row: XidRow) -> list[Rule]:
    bad = Xid(
        codes=row.codes,
        other_than=frozenset() if row.codes else _KNOWN,
        text=row.text,
        no_text=row.no_text,
        lifted_by=row.lifted_by,
    )
    codes = ", ".join(map(str, sorted(row.codes))) or "other"
    out = []
    if row.first is not None:
        action, when, tier = row.first
        out.append(
            Rule(
                name=row.name,
                row=f"XID {codes}",
                signal=Signal.GPU_XID,
                bad=bad,
                excused_by=row.excused_by,
                clean=Signal.GPU_ANSWERS if action is Action.WARN and not row.lifted_by else None,
                release_after_s=None if action is not Action.WARN else 0.0 if row.lifted_by else 600.0,
                action=action,
                when=when,
                tier=tier,
                basis=f"{row.what}; NVIDIA: {row.nvidia}",
                fix=row.fix,
            )
        )
    if row.repeated is not None:
        samples, within_s, action, when = row.repeated
        out.append(
            Rule(
                name=f"{row.name}_repeated",
                row=f"XID {codes}",
                signal=Signal.GPU_XID,
                bad=bad,
                samples=samples,
                within_s=within_s,
                apart_s=_SAME_EVENT_S,
                same=row.same,
                clean=Signal.GPU_ANSWERS,
                release_after_s=_CLEAN_S,
                action=action,
                when=when,
                tier=Tier.SERVE if action is Action.EVICT_GPU else Tier.NONE,
                basis=f"{row.what}, again; NVIDIA: {row.nvidia}",
                fix="after a burn-in",
            )
        )
    return out
