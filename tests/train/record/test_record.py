"""What a run records beside its metrics, ``events.jsonl``, and reading it back."""

from __future__ import annotations

import json

import pytest

from mpizero.comm.communicator import MESSAGE, CommunicatorCall, TimeSpan
from mpizero.errors import DataError
from mpizero.layout import Instruction
from mpizero.train.events import (
    CheckpointWrite,
    PhaseSeconds,
    PipelineCell,
    PipelineTimetable,
    SessionEnd,
    SkippedStep,
    read_run,
)
from mpizero.train.recorder import pipeline_cells
from mpizero.train.run_folder import RunFolder


def write(folder, *events, tail=""):
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event if isinstance(event, dict) else event.to_dict(), allow_nan=False) for event in events]
    (folder / "events.jsonl").write_text("".join(line + "\n" for line in lines) + tail)


# ---------------------------------------------------------------------- the reader


def test_events_are_read_as_they_were_written_by_visit(tmp_path):
    cell = PipelineCell(1, 1, 0, "forward", 0.0, 1.0)
    first = [
        PhaseSeconds(step=4, seconds=[0.5, 0.4], reading=[0.0, 0.1], phases={"forward": [0.5, 0.4]}),
        PipelineTimetable(step=4, schedule="1f1b", planned=[cell], measured=[cell]),
        CheckpointWrite(step=4, path="checkpoints/step_00000004", bytes=10, seconds=1, beside=True),
        SessionEnd(step=5, reason="stopped", message="SIGTERM", loss=0.5),
    ]
    skipped = SkippedStep(visit=1, step=5, found=[{"rank": 0, "tensor": "w", "start": 0, "stop": 2}])
    later = {"kind": "later versions have more", "visit": 1}
    write(tmp_path, *first, later, skipped.to_dict() | {"more": 1}, tail='{"kind": "sk')  # cut as the job was killed
    run = read_run(tmp_path)
    assert [visit.events for visit in run.sessions] == [tuple(first), (skipped,)]
    one, two = run.sessions
    assert (one.start, one.memory, one.phases, one.timetables) == (None, None, (first[0],), (first[1],))
    assert (one.checkpoints, one.skipped, one.end) == ((first[2],), (), first[3])
    assert (two.skipped, two.end, run.steps, run.result) == ((skipped,), None, (), None)


def test_a_run_without_events_has_its_metrics(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    (tmp_path / "metrics.superseded.jsonl").write_text('{"step": 2, "lo\n{"step": 3, "loss": 0.7}\n')
    (tmp_path / "run_complete").write_text('{"steps": 1}\n')
    run = read_run(tmp_path)
    assert (run.steps, run.superseded) == (({"step": 1, "loss": 0.5},), ({"step": 3, "loss": 0.7},))
    assert (run.sessions, run.result) == ((), {"steps": 1})


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"kind": "end", "reason": "done"}\nno JSON\n', "line 2: damaged: no object of JSON: b'no JSON'"),
        ('{"kind": "end"}\n', "line 1: damaged event 'end': reason is missing"),
        ('{"kind": "end", "reason": "done", "loss": "high"}\n', "line 1: damaged event 'end': loss is 'high'"),
        (
            '{"kind": "phases", "seconds": [1.0, 2.0], "reading": [0, 0], "phases": {"forward": [1.0, "b"]}}\n',
            "line 1: damaged event 'phases': forward is no list of 2 numbers: [1.0, 'b']",
        ),
        (
            '{"kind": "memory", "counted": {"parameters": [7, 8]}, "peak": [1], "resident": [1]}\n',
            "damaged event 'memory': parameters is no list of 1 numbers: [7, 8]",
        ),
        ('{"kind": "timetable", "schedule": "", "planned": [], "measured": [7]}\n', "measured has a cell that is none"),
        (
            '{"kind": "timetable", "schedule": "", "planned": [], "measured": [[0, 0, 0, "forward", "x", 1.0]]}\n',
            "measured has a cell that is none: [0, 0, 0, 'forward', 'x', 1.0]",
        ),
        ('{"kind": "end", "reason": "done", "seconds": 1e308}\n', "damaged event 'end': seconds is 1e+308"),
        ('{"kind": "end", "reason": "done", "time": 1e17}\n', "damaged event 'end': time is 1e+17"),
        ('{"kind": "end", "reason": "done", "step": 1%s}\n' % ("0" * 4000), "damaged event 'end': step is 1000"),
        ('{"kind": "skipped", "found": [7]}\n', "damaged event 'skipped': found is [7]"),
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(tmp_path, lines, said):
    (tmp_path / "events.jsonl").write_text(lines)
    with pytest.raises(DataError, match=r"events\.jsonl, line \d") as error:
        read_run(tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize("step", ["null", "-1", "1.5", "true", '"1"', "[1]", "1" + "0" * 30])
def test_a_line_of_metrics_without_a_step_is_damaged(tmp_path, step):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1, "loss": 0.5}}\n{{"step": {step}, "loss": 0.5}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: damaged: no number of a step"):
        read_run(tmp_path)


def test_what_is_no_run_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"not the folder of a run, which has a file metrics\.jsonl or events\.jsonl"):
        read_run(tmp_path)


def test_a_visit_counts_on_after_an_event_that_was_cut(tmp_path):
    folder = RunFolder(tmp_path / "checkpoints")
    folder.open()
    assert folder.continue_events() == 0
    ends = SessionEnd(visit=0, reason="done"), SessionEnd(visit=4, reason="done")
    write(tmp_path, *ends, tail='{"kind": "end", "visi')
    assert folder.continue_events() == 5
    folder.write_event(SessionEnd(visit=5, reason="done").to_dict())
    assert [visit.number for visit in read_run(tmp_path).sessions] == [0, 4, 5]
    assert (folder.set_aside() / "events.jsonl").exists()
    folder.close()


# ---------------------------------------------------------------------- the cells of a pipeline


def test_a_cell_begins_when_its_input_has_come_and_not_with_messages_inside_of_it():
    """Ring attention receives in the middle of a pass; only what other stages send comes before it."""

    stops = (("pipeline", 2.0), ("context", 5.0))
    spans = [TimeSpan(MESSAGE, CommunicatorCall(name, "irecv", "", 0), stop - 0.5, stop) for name, stop in stops]
    spans.append(TimeSpan("schedule", Instruction("forward", 0, 0), 1.0, 6.0))
    (cell,) = pipeline_cells(spans, 1, 10.0)
    assert (cell.stage, cell.start, cell.end) == (1, 12.0, 16.0)
