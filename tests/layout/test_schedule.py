"""Pipeline schedules: every one can be run, holds few caches, and prints."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from mpizero.errors import ConfigError, ExitStatus
from mpizero.layout import SCHEDULES, Costs, Instruction, Schedule, build_schedule, chunk_stages, simulate
from mpizero.layout.schedules import timetable

ROOT = Path(__file__).resolve().parents[2]
KINDS = [(name, 1) for name in SCHEDULES if name != "interleaved"] + [("interleaved", 2), ("interleaved", 3)]
#: What stage ``r`` of ``s`` may hold, from ``m`` micro-batches and ``v`` chunks a stage.
LIMITS = {
    "gpipe": lambda r, s, m, v: m,
    "1f1b": lambda r, s, m, v: s - r,
    "interleaved": lambda r, s, m, v: 2 * (s - r - 1) + (v - 1) * s + 1,
    "zero_bubble": lambda r, s, m, v: s,
    "zero_bubble_v": lambda r, s, m, v: 2 * s,
}


@pytest.mark.parametrize(("name", "virtual"), KINDS)
def test_every_schedule_can_be_run_and_holds_few_caches(name: str, virtual: int) -> None:
    """Building proves it: no deadlock, all dependencies, every instruction once, ascending retirement."""
    for stages in (1, 2, 3, 4, 8):
        around = {few + by for few in (2, stages, 2 * stages) for by in (-1, 0, 1, 2)}
        for micro_batches in sorted({*filter(None, around), 31}):  # more are more of the same between beginning and end
            schedule = build_schedule(name, stages, micro_batches, virtual)
            allowed = [LIMITS[name](stage, stages, schedule.micro_batches, virtual) for stage in range(stages)]
            assert all(held <= limit for held, limit in zip(schedule.caches(), allowed, strict=True))
            padded = -(-micro_batches // stages) * stages if name == "interleaved" else micro_batches
            assert schedule.micro_batches == padded


def test_cached_activations_reach_the_limits_that_plan_counts_with() -> None:
    assert build_schedule("gpipe", 4, 8).caches() == (8, 8, 8, 8)
    assert build_schedule("1f1b", 4, 8).caches() == (4, 3, 2, 1)
    assert build_schedule("1f1b", 4, 2).caches() == (2, 2, 2, 1)
    assert build_schedule("interleaved", 4, 8, 2).caches() == (11, 9, 7, 5)
    assert build_schedule("zero_bubble", 4, 8).caches() == (4, 4, 4, 4)
    assert build_schedule("zero_bubble_v", 4, 8).caches() == (8, 8, 8, 8)


def test_peaks_weigh_caches_by_chunk_and_what_is_left_for_the_weight_half() -> None:
    schedule = build_schedule("zero_bubble", 2, 4)
    assert schedule.caches() == (2, 2)
    assert schedule.peaks([10.0, 1.0]) == (20.0, 2.0)
    assert schedule.peaks([10.0, 1.0], deferred=[10.0, 0.5]) == (20.0, 1.5)
    assert build_schedule("zero_bubble_v", 2, 4).peaks([1.0, 0.0, 0.0, 0.0])[1] == 0.0


def test_chunks_lie_in_loops_or_in_a_v() -> None:
    assert chunk_stages("1f1b", 3) == (0, 1, 2)
    assert chunk_stages("interleaved", 3, 2) == (0, 1, 2, 0, 1, 2)
    assert chunk_stages("zero_bubble_v", 3) == chunk_stages("zero_bubble_v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert build_schedule("zero_bubble_v", 3, 4).chunks_of(1) == (1, 4)


def test_one_stage_computes_a_micro_batch_at_a_time() -> None:
    for name in ("1f1b", "zero_bubble"):
        (program,) = build_schedule(name, 1, 2).programs
        assert program == tuple(Instruction(kind, 0, micro) for micro in (0, 1) for kind in ("forward", "backward"))


def test_backwards_are_whole_only_where_no_other_stage_waits_for_the_input_half() -> None:
    schedule = build_schedule("zero_bubble_v", 4, 9)
    whole = {i.chunk for program in schedule.programs for i in program if i.kind == "backward"}
    assert whole == {0, 4}  # chunk 4 hands its gradient to chunk 3 of its own stage, chunk 0 hands it to nobody


@pytest.mark.parametrize(("name", "virtual"), KINDS)
def test_each_half_of_a_chunk_s_work_ascends_over_the_micro_batches(name: str, virtual: int) -> None:
    """So the streaming sum over grains can take it, and messages of one chunk arrive in the order they are sent."""
    schedule = build_schedule(name, 4, 9, virtual)
    for program in schedule.programs:
        for chunk in {instruction.chunk for instruction in program}:
            for half in ("forward", "backward_input", "backward_weights"):
                done = [part for i in program if i.chunk == chunk for part in i.does]
                assert [i.micro for i in done if i.kind == half] == list(range(schedule.micro_batches))


def test_schedules_are_built_once() -> None:
    assert build_schedule("1f1b", 4, 8) is build_schedule("1f1b", 4, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 2, 4), r"unknown schedule '2f2b'; expected one of gpipe, 1f1b, interleaved, zero_bubble, zero_bub"),
        (("1f1b", 0, 4), "0 stages"),
        (("1f1b", 2, 0), "0 micro-batches"),
        (("1f1b", 2, 4.0), "4.0 micro-batches"),
        (("1f1b", 2, 4, 2), "'1f1b' cannot have 2 virtual stages; expected 1"),
        (("interleaved", 2, 4), "'interleaved' cannot have 1 virtual stages; expected at least 2"),
        (("interleaved", 2, 4, 0), "0 virtual stages"),
        (("zero_bubble_v", 2, 4, 3), "3 virtual stages; expected 2"),
    ],
)
def test_schedules_that_mean_nothing_are_refused(arguments: tuple[str, int, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build_schedule(*arguments)
    assert caught.value.status == ExitStatus.CONFIG


def rows(schedule: Schedule, costs: Costs | None = None, unit: float | None = None) -> list[str]:
    return [
        line
        for line in timetable(simulate(schedule, costs or Costs.uniform(schedule.chunks)), unit).splitlines()
        if line.startswith("stage")
    ]


def test_a_timetable_has_a_row_a_stage_and_a_column_a_unit_of_time() -> None:
    assert rows(build_schedule("1f1b", 2, 3)) == [
        "stage 0 | F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2",
        "stage 1 | .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .",
    ]
    assert rows(build_schedule("zero_bubble", 2, 2)) == [
        "stage 0 | F0 F1 .  B0 B0 B1 B1",
        "stage 1 | .  F0 I0 F1 I1 W0 W1",
    ]
    assert rows(build_schedule("interleaved", 2, 2, 2)) == [
        "stage 0 | F0a F1a F0b F1b .   .   B0b B0b .   B1b B1b B0a B0a B1a B1a",
        "stage 1 | .   F0a F1a F0b B0b B0b F1b B1b B1b B0a B0a B1a B1a .   .",
    ]


def test_a_timetable_s_unit_follows_the_costs() -> None:
    schedule = build_schedule("gpipe", 1, 1)
    assert rows(schedule, Costs.uniform(1, 0.5, 0.5, 0.25)) == ["stage 0 | F0 F0 B0 B0 B0"]
    assert rows(schedule, Costs.uniform(1, 2, 2, 2), unit=1.0) == ["stage 0 | F0 F0 B0 B0 B0 B0"]
    assert rows(schedule, Costs.uniform(1, 0, 0, 0)) == ["stage 0 |"]
    with pytest.raises(ConfigError, match="0.0 seconds"):
        rows(schedule, unit=0.0)


def test_the_script_prints_the_timetable_or_one_line_of_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["plot_schedule.py", *arguments])
        monkeypatch.syspath_prepend(ROOT / "scripts")
        runpy.run_path(str(ROOT / "scripts" / "plot_schedule.py"), run_name="__main__")
        return capsys.readouterr().out

    lines = script("zero_bubble", "--stages", "2", "--micro-batches", "2", "--costs", "1,1,1").splitlines()
    assert rows(build_schedule("zero_bubble", 2, 2))[1] in lines
    assert any("bubble 1 s = 14.3 %" in line for line in lines)
    with pytest.raises(SystemExit, match="2"):
        script("1f1b", "--stages", "0")
    assert "0 stages" in capsys.readouterr().err.splitlines()[-1]
