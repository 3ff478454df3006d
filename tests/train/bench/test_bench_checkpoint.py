"""``mpizero bench checkpoint``: what it measures, says and refuses."""

from __future__ import annotations

import json
import os

import pytest

from mpizero.errors import ConfigError
from mpizero.testing import run_in_threads
from mpizero.tools.bench import checkpoint

TIMED = [
    "plain copy",
    "asynchronous stall",
    "raw write",
    "raw read",
    "cold raw read",
    "save direct",
    "load",
    "load unverified",
    "verification",
    "cold load",
    "cold load unverified",
    "cold verification",
]


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_is_timed_in_every_repetition_and_nothing_stays(tmp_path, ranks):
    lines: list[str] = []
    given = checkpoint.CheckpointRequest(2_000_000, ("direct",), 3, str(tmp_path))
    figures = run_in_threads(ranks, lambda comm: checkpoint.measure_checkpoint(given, comm, lines.append))[0]
    assert [timing.name for timing in figures.timings] == TIMED
    assert all(timing.least <= timing.seconds <= timing.most for timing in figures.timings)
    assert {timing.name: timing.against for timing in figures.timings if timing.against} == {
        "asynchronous stall": "plain copy",
        "save direct": "raw write",
        "load": "raw read",
        "load unverified": "raw read",
        "verification": "load",
        "cold load": "cold raw read",
        "cold load unverified": "cold raw read",
        "cold verification": "cold load",
    }
    assert 0.8 * 2e6 < figures.nbytes <= 2e6
    assert set(figures.peaks) == {"save direct", "load"}
    assert len(lines) == 3
    assert os.listdir(tmp_path) == []
    assert json.loads(checkpoint.as_json(figures))["ranks"] == ranks
    assert all(name in checkpoint.report(figures) for name in TIMED)


def test_the_command_prints_a_table_or_json(on_threads):
    outcome = on_threads(2, "bench", "checkpoint", "--bytes", "1e6", "--repeat", "1", "--json", "--backend", "direct")
    assert outcome.status == 0, outcome.err
    assert outcome.result["benchmark"] == "checkpoint"
    assert outcome.result["ranks"] == 2
    assert sorted(os.listdir(on_threads.folder)) == ["text.txt", "tiny.toml"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1.0, "direct", 1, "."), "--bytes 1.0: must be from"),
        ((float("nan"), "direct", 1, "."), "--bytes nan"),
        ((1e6, "direct", 0, "."), "--repeat 0"),
        ((1e6, "direct", 1, "nowhere"), "--folder nowhere"),
        ((1e6, "mpio", 1, "."), 'backend="direct"'),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, text):
    def parse(comm):
        with pytest.raises(ConfigError) as caught:
            checkpoint.CheckpointRequest.parse(*arguments, comm)
        return str(caught.value)

    assert text in run_in_threads(1, parse)[0]
