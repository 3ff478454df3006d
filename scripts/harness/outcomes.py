"""Count the outcomes of all cases (disturbed jobs or files) in a table; if one case is bad, the whole test fails."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from harness.tables import aligned


@dataclass
class Row:
    """Hold one line of the table: cases of one kind, with their outcomes and problems.

    ``good`` counts the good cases by outcome, ``bad`` has a text for each bad one. ``left_out`` is the reason why the
    cases were left out, or "".
    """

    title: str
    good: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    left_out: str = ""
    started: float = field(default_factory=time.monotonic)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        """The number of cases counted so far."""
        return sum(self.good.values()) + len(self.bad)

    def add(self, problem: str, outcome: str, case: str) -> None:
        """Count a case: as bad with its problem, or as good with its outcome if the problem is ""."""
        self.seconds = time.monotonic() - self.started
        if problem:
            self.bad.append(f"{case}: {problem}")
            print(f"  BAD  {self.title}: {case}: {problem}", flush=True)
        else:
            self.good[outcome] += 1
        if sys.stderr.isatty():
            print(f"\r  {self.title}: {self.cases}, {len(self.bad)} bad\033[K", end="", file=sys.stderr, flush=True)

    def cells(self) -> tuple[object, ...]:
        """Return this row's cells."""
        if self.left_out:
            return self.title, "-", "-", "", f"left out: {self.left_out}"
        seen = ", ".join(f"{count} {outcome}" for outcome, count in self.good.most_common())
        return self.title, self.cases, len(self.bad), f"{self.seconds:.0f} s", seen


class Table:
    """Collect and print the rows of the table."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, title: str, left_out: str = "") -> Row:
        """Add a new, empty row to the table, and return it."""
        self.rows.append(Row(title, left_out=left_out))
        return self.rows[-1]

    def show(self, head: str) -> bool:
        """Print the table; tell whether there was at least one case and none was bad."""
        bad, cases = sum(len(row.bad) for row in self.rows), sum(row.cases for row in self.rows)
        rows = [*(row.cells() for row in self.rows), ("all", cases, bad, "", "")]
        print("\n" + aligned((head, "cases", "bad", "", ""), rows))
        print("".join(f"BAD  {row.title}: {problem}\n" for row in self.rows for problem in row.bad), end="")
        return bad == 0 and cases > 0
