"""The page about scaling says what the planner says of the cluster that is assumed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts" / "benchmarks"), str(ROOT / "scripts")]

import scaling_page as page  # noqa: E402

del sys.path[:2]

TEXT = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_row_of_the_page_is_what_the_planner_says_now():
    (row,) = (row for table in page.tables() for row in table.rows if row.name == "weak-8")  # 8 ranks: quickly planned
    (table,) = (table for table in page.tables() if row in table.rows)
    assert f"| {' | '.join(table.cells(row, row.plan()))} |" in TEXT.splitlines()


def test_efficiency_is_products_over_the_step_in_the_mean_over_ranks():
    ranks = [{"forward": 1.0, "backward": 2.0, "waiting": 1.0}, {"forward": 1.0, "backward": 1.0, "waiting": 0.0}]
    assert page.efficiency({"expected": {"ranks": ranks, "seconds": 5.0}}) == 0.5
