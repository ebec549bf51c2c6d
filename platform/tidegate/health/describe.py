"""The rules as a page for people: `python -m tidegate.health.describe > docs/health-rules.md`."""

from __future__ import annotations

import sys

from tidegate.arbiter.messages import Action
from tidegate.health.rule import Rule
from tidegate.health.rules import rules_of
from tidegate.health.xids import XIDS
from tidegate.spec.policy import HealthSpec

_TOP = """\
# Health rules

Made from the code by `python -m tidegate.health.describe`; a test compares the two. These are the defaults. Each rule
can be changed by its name in `policy.yaml`:

```yaml
health:
  rules:
    tensor_warn: {limit: 0.7}            # also release, samples, within_s, for_s, release_after_s, action, when
    nvlink_crc: {action: warn}
    power_low: {enabled: false}
```

"row" is the row in the specification's table. "takes" is what it takes until the verdict stands: bad looks in a row,
unless it says "within". Counters are judged by what they rise by, never by what they stand at: the first look, a look
after a gap and a reset are new beginnings, and a counter at its ceiling says nothing. A value that is missing,
refused or can't be true neither raises a verdict nor lifts one. Verdicts that end by themselves need that many
seconds of good looks; each eviction of the same GPU, port or node within a day doubles this (a day at most), and
after the third within a week it stays out until a person clears it (`repeat_offender`).

Rules "of the gang" compare GPUs of one gang by the median, and by the MAD from four on. Rows 12, 42 and 44 to 46
(hangs, silent links, silent agents, numbers that are not finite, replicas that differ) are not here: the gang, the
arbiter and the training loop see those (`docs/decisions/0006-rows-outside-the-table.md`). `gpu_count` and `driver_gone`
need `health.gpus_per_node`, `ib_rate` needs `health.ib_port_gbits`. Of network ports those in `health.ib_ports` are
judged; with none named, each InfiniBand port that was active once. NVLinks that are down count on nodes where a GPU had
all of its own up.
"""


def page(spec: HealthSpec) -> str:
    """Markdown: the table, then the XIDs that have no rule."""
    rules = rules_of(spec)
    table = [rule for rule in rules if not rule.row.startswith("XID")]
    xids = [rule for rule in rules if rule.row.startswith("XID")]
    quiet = [
        f"- {', '.join(map(str, sorted(row.codes)))}: {row.what} (NVIDIA: {row.nvidia})"
        for row in XIDS
        if row.first is None
    ]
    return "\n".join(
        [
            _TOP,
            "## Signals",
            "",
            *_rows(table),
            "",
            "## XIDs",
            "",
            "A GPU that answers and has no further XID lifts what is not latched.",
            "",
            *_rows(xids),
            "",
            "These have no rule of their own:",
            "",
            *quiet,
            "",
        ]
    )


def _rows(rules: list[Rule]) -> list[str]:
    head = "| rule | row | signal | bad when | takes | verdict | ends | basis |"
    return [head, "|---|---|---|---|---|---|---|---|", *(_row(rule) for rule in rules)]


def _row(rule: Rule) -> str:
    verdict = f"{rule.action}"
    if rule.action is not Action.WARN:
        verdict += f", {rule.when}, then fit for: {rule.tier}".replace("_", " ", 3)
    cells = (f"`{rule.name}`", rule.row, f"`{rule.signal}`", _bad(rule), _takes(rule), verdict, rule.ends, rule.basis)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bad(rule: Rule) -> str:
    parts = [str(rule.bad)]
    if rule.gang:
        parts.append("of the gang")
    parts += [f"while {guard}" for guard in rule.while_]
    if rule.witness:
        parts.append("and one of " + ", ".join(f"`{name}`" for name in sorted(rule.witness)) + " stands too")
    if rule.excused_by:
        parts.append("unless " + ", ".join(f"`{name}`" for name in sorted(rule.excused_by)) + " has just come")
    return "; ".join(parts)


def _takes(rule: Rule) -> str:
    parts = [f"{rule.samples}"]
    if rule.within_s is not None:
        parts.append(f"within {_time(rule.within_s)}")
    if rule.apart_s > 0:
        parts.append(f"{_time(rule.apart_s)} apart")
    if rule.for_s:
        parts.append(f"for {_time(rule.for_s)}")
    if rule.same is not None:
        parts.append("of one place on the chip")
    return ", ".join(parts)


def _time(seconds: float) -> str:
    return f"{seconds / 3600:g} h" if seconds >= 3600 else f"{seconds:g} s"


if __name__ == "__main__":
    sys.stdout.write(page(HealthSpec(gpus_per_node=8, ib_port_gbits=400)))
