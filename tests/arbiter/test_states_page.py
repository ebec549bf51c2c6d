"""The state table on docs/architecture.md is the one in the code."""

from __future__ import annotations

import re
from pathlib import Path

from tidegate.arbiter.states import NEXT, ClaimState

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_every_edge_is_on_the_page_and_no_other() -> None:
    states = "|".join(ClaimState)
    row = re.compile(rf"^\| ((?:{states})(?:, (?:{states}))*) \| ((?:{states})(?:, (?:{states}))*) \| \S", re.MULTILINE)
    on_page = {
        (before, after)
        for left, right in row.findall(PAGE.read_text(encoding="utf-8"))
        for before in left.split(", ")
        for after in right.split(", ")
    }
    assert on_page == {(str(state), str(after)) for state, following in NEXT.items() for after in following}
