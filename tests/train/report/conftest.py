"""Folders of runs, written as a run writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest

from mpizero.train.events import (
    CheckpointWrite,
    MemoryCount,
    PhaseSeconds,
    PipelineTimetable,
    RunEvent,
    SessionEnd,
    SessionStart,
    SkippedStep,
)

#: A name that would be a script on a page, and mathematics in a picture.
EVIL = "<script>alert(1)</script> $x_{$ &amp; \x1b[31m"
BEGUN = 1.7e9


def start(ranks: int = 4, **more) -> SessionStart:
    """Two stages, the other ranks replicas; two ranks a node."""
    half = ranks // 2
    values = {
        "time": BEGUN,
        "steps": 100,
        "described": "a small model",
        "strategy": "zero1",
        "parameter_count": 1000,
        "ranks": ranks,
        "nodes": [rank // 2 for rank in range(ranks)],
        "hosts": [f"host{node}" for node in range((ranks + 1) // 2)],
        "coordinates": {"pipeline": [rank // half for rank in range(ranks)], "data": [r % half for r in range(ranks)]},
        "layout": {
            "global_batch": 8,
            "grains": 4,
            "grain_size": 2,
            "chunks": [],
            "exactness": "the bits of one process",
        },
        "config": {"train": {"steps": 100, "seed": 0}, "model": {"name": EVIL}},
        "versions": {"mpizero": "1.2.3"},
        "machine": {"processor": "a processor"},
        "planned": {"parameters": [1000] * ranks, "activations": [70] * ranks},
    }
    return SessionStart(**(values | more))


def line(step: int, **more) -> dict:
    return {"step": step, "loss": 1.0 / step, "learning_rate": 0.1, "samples_per_second": 50.0, **more}


def write_run(
    folder: Path, lines: Iterable[dict], events: Iterable[RunEvent] = (), superseded: Iterable[dict] = (), result=None
) -> Path:
    folder.mkdir(exist_ok=True)
    files = {
        "metrics.jsonl": lines,
        "events.jsonl": [event.to_dict() for event in events],
        "metrics.superseded.jsonl": superseded,
        "run_complete": [] if result is None else [result],
    }
    for name, found in files.items():
        if found := list(found):
            (folder / name).write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def eventful(tmp_path_factory) -> Path:
    """A run of four ranks, killed after step 60, resumed at step 50 on two; of the others, a record of each kind."""
    cells = [[stage, stage, 0, "forward", float(stage), stage + 1.0] for stage in (0, 1)]
    first = [
        start(),
        MemoryCount(
            time=BEGUN + 1, step=1, counted={"parameters": [1000, 1000, 1000, 1010]}, peak=[1] * 4, resident=[9] * 4
        ),
        PhaseSeconds(
            time=BEGUN + 2,
            step=4,
            seconds=[1.0] * 4,
            reading=[0.0] * 4,
            phases={"forward": [0.9, 0.8, 0.9, 0.59], "waiting": [0.1, 0.2, 0.1, 0.41]},
        ),
        PipelineTimetable(
            time=BEGUN + 2, step=4, schedule="gpipe", planned=cells, measured=[*cells, [0, 0, 1, "forward", 1.0, 2.0]]
        ),
        SkippedStep(time=BEGUN + 3, step=12, found=[{"rank": 1, "tensor": "w", "start": 2, "stop": 4}]),
        CheckpointWrite(time=BEGUN + 5, step=50, path="checkpoints/step_00000050", bytes=4000, seconds=0.5),
    ]
    second = [
        start(2, visit=1, step=50, superseded=10, time=BEGUN + 60),
        SessionEnd(visit=1, step=100, time=BEGUN + 90, reason="done", loss=0.01, seconds=30.0),
    ]
    lines = [line(step) for step in range(1, 101)]
    lines[11] |= {"loss": None, "skipped": f"the gradient of '{EVIL}' is not finite on rank 1, samples 2 to 3"}
    lines[99] |= {"validation_loss": 0.5, EVIL: 0.25}
    result = {"steps": 100, "loss": 0.01, "parameters_sha256": "cafe" * 16, "samples_per_second": 7771.25}
    return write_run(
        tmp_path_factory.mktemp("runs") / "eventful", lines, [*first, *second], [line(s) for s in range(51, 61)], result
    )
