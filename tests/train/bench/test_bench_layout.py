"""What is counted of a rank that trains equals what the plan computes: ``bench memory`` of split models."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import pytest

from mpizero.errors import ConfigError, ExitStatus
from mpizero.testing import run_in_threads
from mpizero.tools.bench.memory import LayoutRequest, layout_report, measure_layout
from mpizero.tools.bench.strategies import CacheMeter, MemoryRequest
from mpizero.tools.plan.memory import buffers
from mpizero.train.config.sections import ParallelSection


@dataclass(frozen=True)
class Cache:
    """An object that keeps arrays."""

    arrays: tuple
    note: str = "not an array"


def test_a_buffer_counts_once_however_many_views_are_kept():
    meter, whole = CacheMeter(), np.zeros((4, 5))
    first = meter.keep(Cache((whole[1:], {"a": [whole.T, whole.reshape(-1)[::2]]}, np.ones(3))))
    assert meter.held == 160 + 24
    second = meter.keep((whole[:1],))
    assert meter.held == 160 + 24
    meter.drop(first)
    assert meter.held == 160
    meter.drop(second)
    assert (meter.held, meter.peak) == (0, 184)


def test_what_shall_not_count_is_left_out():
    meter, data = CacheMeter(), np.zeros(10)
    found = meter.keep((data[2:], np.ones(2)), but=[{"x": data[:3]}])
    assert (meter.held, len(found)) == (16, 1)


def test_buffers_are_found_in_anything_that_caches_are_made_of():
    kept = [np.zeros(n) for n in range(1, 5)]
    found = buffers({"a": (kept[0], None, 3), "b": Cache((kept[1], [kept[2]]))})
    assert sorted(array.size for array in found) == [1, 2, 3]


LAYOUTS = {
    "halved backward": (2, {"pipeline": 2, "schedule": "zero_bubble"}, "ddp", True),
    "parts of stages": (4, {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}, "zero3", False),
    "v": (4, {"pipeline": 2, "schedule": "zero_bubble_v"}, "zero2", False),
    "split sequences": (2, {"context": 2}, "zero1", True),
    "three ways": (8, {"pipeline": 2, "tensor": 2, "data": 2}, "zero1", False),
}


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


def test_the_command_prints_every_rank_beside_its_plan(on_threads):
    arguments = ["bench", "memory", "--pipeline", "2", "--parameters", "1e5", "--memory", "private", "--steps", "1"]
    outcome = on_threads(4, *arguments, "--strategy", "zero1", "--json")
    assert outcome.status == 0, outcome.err
    (table,) = json.loads(outcome.out)["layouts"]
    assert (table["memory"], table["strategy"]) == ("private", "zero1")
    assert table["layout"] == "pipeline 2 x tensor 1 x data 2, 1f1b, zero1"
    assert [row["here"]["pipeline"] for row in table["rows"]] == [0, 0, 1, 1]
    for row in table["rows"]:
        assert row["held"] == row["planned"]
        assert row["sent"] == row["planned_sent"] > 0


@pytest.mark.parametrize(
    ("ranks", "options", "text"),
    [
        (2, ["--pipeline", "3"], "--pipeline 3: does not fit this job"),
        (0, ["--data", "2"], "--data 2: does not fit this job"),
        (2, ["--pipeline", "2", "--micro-batches", "0"], "--micro-batches 0"),
        (2, ["--pipeline", "2", "--schedule", "2f2b"], '--schedule "2f2b": must be one of'),
        (2, ["--pipeline", "2", "--schedule", "interleaved"], "--virtual-stages 1: does not fit --schedule"),
        (2, ["--pipeline", "2", "--strategy", "zero4"], "--strategies zero4: zero4 is none of"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(on_threads, ranks, options, text):
    outcome = on_threads(ranks, "bench", "memory", *options)
    assert outcome.status == ExitStatus.CONFIG
    assert len(outcome.told) == 1, outcome.err
    assert text in outcome.told[0]


def test_micro_batches_must_be_some():
    with pytest.raises(ConfigError, match="--micro-batches"):
        LayoutRequest(MemoryRequest(10, ("ddp",), (True,), 1), ParallelSection(pipeline=2), 0)
