"""Count the outcomes of all cases (disturbed jobs or files) in a table; if one case is bad, the whole test fails."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field


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

    def line(self) -> str:
        """Return this row as a line of text."""
        if self.left_out:
            return f"{self.title:58s}     -     -         left out: {self.left_out}"
        seen = ", ".join(f"{count} {outcome}" for outcome, count in self.good.most_common())
        return f"{self.title:58s} {self.cases:5d} {len(self.bad):5d} {self.seconds:6.0f} s  {seen}"


class Table:
    """Collect and print the rows of the table."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def row(self, title: str) -> Row:
        """Add a new, empty row to the table, and return it."""
        self.rows.append(Row(title))
        return self.rows[-1]

    def leave_out(self, title: str, reason: str) -> None:
        """Add a row that says that the cases ``title`` were left out, and why."""
        self.rows.append(Row(title, left_out=reason))

    def show(self) -> bool:
        """Print the table; tell whether there was at least one case and none was bad."""
        print(f"\n{'what was done to saves':58s} cases   bad            outcomes")
        for row in self.rows:
            print(row.line())
        bad = sum(len(row.bad) for row in self.rows)
        cases = sum(row.cases for row in self.rows)
        print(f"{'all':58s} {cases:5d} {bad:5d}")
        for row in self.rows:
            for problem in row.bad:
                print(f"BAD  {row.title}: {problem}")
        return bad == 0 and cases > 0
