"""What a rule is: one row of the table in `table.py` and `xids.py`."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.arbiter.messages import Action, When
from tidegate.health.conditions import Condition
from tidegate.health.evidence import Guard
from tidegate.health.readings import Signal
from tidegate.ids import Tier

LATCHED = "a person sets it healthy after a reset, or the machine reboots"
PROBATION_S = 600.0
"""How long a fault that may come back must stay away; doubled for each earlier eviction within a day."""

EDGE = -1.0
"""As `Rule.apart_s`: each row of bad readings counts once, however long it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    name: str
    row: str
    """Of the specification's table (4.1, or an XID of 4.2)."""
    signal: Signal
    bad: Condition
    samples: int = 1
    """Bad readings that it takes, in a row unless `within_s` is given."""
    within_s: float | None = None
    """The bad readings need not be in a row, only this close together."""
    apart_s: float = 0.0
    """And of those nearer together than this only the first counts."""
    for_s: float = 0.0
    """And the row must be this long."""
    while_: tuple[Guard, ...] = ()
    """A bad reading counts only while all of these are known to hold."""
    port: bool = False
    """Of network ports only those that the gang needs are judged (`health.ib_ports`, else those seen active); of
    NVLinks those of nodes on which a GPU was seen with all of them up."""
    gang: bool = False
    """Peers are those of the same gang; else those of the node."""
    witness: frozenset[str] = frozenset()
    """One of these rules must find the same subject bad too, now."""
    excused_by: frozenset[str] = frozenset()
    """One of these has just found the same thing, and says what follows."""
    clean: Signal | None = None
    """Of an event nobody hears that it is over: a value of this signal is what counts as good."""
    same: str | None = None
    """What of the text must be the same for two events to be two of one kind; a regular expression with a group."""
    release_after_s: float | None
    """Good readings for this long lift the verdict; None = only a person or a reboot does."""
    action: Action
    when: When = When.NOW
    tier: Tier
    basis: str
    """Where the numbers come from."""
    good: str = "good"
    """What it must be to be lifted, in words."""
    fix: str = ""
    """What to do beside waiting."""

    @property
    def ends(self) -> str:
        if self.release_after_s is None:
            return self.fix or LATCHED
        after = f"{self.good} for {self.release_after_s:g} s" if self.release_after_s else f"{self.good} again"
        return f"{after}; {self.fix}" if self.fix else after
