"""``mpizero bench checkpoint``: what it measures, says and refuses."""

from __future__ import annotations

import json
import os

from mpizero.testing import run_in_threads
from mpizero.tools.bench import checkpoint

#: Operations in the order of the table, and what each is compared with.
TIMED = {
    "plain copy": "",
    "asynchronous stall": "plain copy",
    "raw write": "",
    "raw read": "",
    "cold raw read": "",
    "save direct": "raw write",
    "load": "raw read",
    "load unverified": "raw read",
    "verification": "load",
    "cold load": "cold raw read",
    "cold load unverified": "cold raw read",
    "cold verification": "cold load",
}


def test_every_operation_is_timed_in_every_repetition_and_nothing_stays(tmp_path):
    lines: list[str] = []
    given = checkpoint.CheckpointRequest(2_000_000, ("direct",), 3, str(tmp_path))
    figures = run_in_threads(3, lambda comm: checkpoint.measure_checkpoint(given, comm, lines.append))[0]
    assert [timing.name for timing in figures.timings] == list(TIMED)
    assert all(timing.least <= timing.seconds <= timing.most for timing in figures.timings)
    assert {timing.name: timing.against or "" for timing in figures.timings} == TIMED
    assert 0.8 * 2e6 < figures.nbytes <= 2e6
    assert set(figures.peaks) == {"save direct", "load"}
    assert len(lines) == 3
    assert os.listdir(tmp_path) == []
    assert json.loads(checkpoint.as_json(figures))["ranks"] == 3
    assert all(name in checkpoint.report(figures) for name in TIMED)


def test_the_command_prints_a_table_or_json(on_threads):
    outcome = on_threads(2, "bench", "checkpoint", "--bytes", "1e6", "--repeat", "1", "--json", "--backend", "direct")
    assert outcome.result["benchmark"] == "checkpoint"
    assert outcome.result["ranks"] == 2
    assert sorted(os.listdir(on_threads.folder)) == ["text.txt", "tiny.toml"]
