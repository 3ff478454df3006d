"""What is counted of a rank that trains equals what the plan computes: ``bench memory`` of split models."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from mpizero.testing import run_in_threads
from mpizero.tools.bench.memory import LayoutRequest, layout_report, measure_layout
from mpizero.tools.bench.strategies import CacheMeter, MemoryRequest
from mpizero.train.config.sections import ParallelSection


@dataclass(frozen=True)
class Cache:
    """An object that keeps arrays."""

    arrays: tuple
    note: str = "not an array"


def test_a_buffer_counts_once_however_many_views_are_kept_or_not_at_all():
    meter, whole = CacheMeter(), np.zeros((4, 5))
    first = meter.keep(Cache((whole[1:], {"a": [whole.T, None, 3, np.ones(3)]}, whole.reshape(-1)[::2])))
    assert meter.current == 160 + 24
    second = meter.keep((whole[:1],))
    assert meter.current == 160 + 24
    meter.drop(first)
    assert meter.current == 160
    meter.drop(second)
    assert (meter.current, meter.peak) == (0, 184)
    (_,) = meter.keep((whole[2:], np.ones(2)), but=[{"x": whole[:3]}])
    assert meter.current == 16


#: What more layouts hold and send is in ``tests/planning``.
LAYOUTS = {
    "v": (4, {"pipeline": 2, "schedule": "zero_bubble_v"}, "zero2", False),
    "split sequences": (2, {"context": 2}, "zero1", True),
}


@pytest.mark.usefixtures("without_collections")
@pytest.mark.parametrize("name", LAYOUTS)
def test_counted_bytes_and_messages_of_every_rank_equal_the_plan(name):
    ranks, settings, strategy, shared = LAYOUTS[name]
    steps = 2 if name == "split sequences" else 1  # two are counted by the same loop on every layout
    request = LayoutRequest(MemoryRequest(10_000, (strategy,), (shared,), steps), ParallelSection(**settings), 3)
    (table,) = run_in_threads(ranks, lambda comm: measure_layout(request, comm))[0]
    assert [row.rank for row in table.rows] == list(range(ranks))
    for row in table.rows:
        assert row.held["activations"] > 0
        assert row.held == row.planned, (name, row)
        assert (row.sent, row.messages) == (row.planned_sent, row.planned_messages), (name, row)
    assert f"{ranks - 1:4} " in layout_report([table])


@pytest.mark.slow
@pytest.mark.usefixtures("without_collections")
def test_the_command_prints_every_rank_beside_its_plan(on_threads):
    arguments = ["bench", "memory", "--pipeline", "2", "--parameters", "1e4", "--memory", "private", "--steps", "1"]
    outcome = on_threads(4, *arguments, "--strategy", "zero1", "--json")
    (table,) = json.loads(outcome.out)["layouts"]
    assert (table["memory"], table["strategy"]) == ("private", "zero1")
    assert table["layout"] == "pipeline 2 x tensor 1 x data 2, 1f1b, zero1"
    assert [row["here"]["pipeline"] for row in table["rows"]] == [0, 0, 1, 1]
    for row in table["rows"]:
        assert row["held"] == row["planned"]
        assert row["sent"] == row["planned_sent"] > 0
