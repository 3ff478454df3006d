"""The simulator: its figures against the papers' formulas, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpizero.errors import ConfigError, ExitStatus, ScheduleError
from mpizero.layout import SCHEDULES, Costs, Instruction, Schedule, Simulation, bubble_formula, build_schedule, simulate

SECONDS = st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0])


def run(name: str, stages: int, micro_batches: int, virtual: int, seconds: tuple[float, ...]) -> Simulation:
    schedule = build_schedule(name, stages, micro_batches, virtual)
    return simulate(schedule, Costs.uniform(schedule.chunks, *seconds))


def formula(simulation: Simulation, virtual: int, seconds: tuple[float, ...]) -> float:
    schedule = simulation.schedule
    costs = Costs.uniform(schedule.chunks, *seconds)
    return bubble_formula(schedule.name, schedule.stages, schedule.micro_batches, virtual, costs)


@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_bubbles_are_those_of_the_papers(stages: int) -> None:
    for micro_batches in (1, 2, 3, 7, 8, 20):
        for name in ("gpipe", "1f1b"):
            simulation = run(name, stages, micro_batches, 1, (1.0, 1.5, 0.5))
            assert simulation.bubble_share == pytest.approx((stages - 1) / (micro_batches + stages - 1))
        for virtual in (2, 3):
            simulation = run("interleaved", stages, micro_batches, virtual, (1.0, 1.5, 0.5))
            assert simulation.bubble == pytest.approx((stages - 1) * 3.0)  # F + B of one of the v chunks of a stage
            padded = simulation.schedule.micro_batches
            assert simulation.bubble_share == pytest.approx((stages - 1) / (virtual * padded + stages - 1))
        for forward, inputs, weights in [(1.0, 1.0, 1.0), (2.0, 2.0, 1.0), (1.0, 3.0, 0.5), (2.0, 1.0, 1.0)]:
            simulation = run("zero_bubble", stages, micro_batches, 1, (forward, inputs, weights))
            assert simulation.bubble == pytest.approx(formula(simulation, 1, (forward, inputs, weights)))
            if micro_batches >= stages:
                assert simulation.bubble == pytest.approx((stages - 1) * (forward + inputs - weights))
        if micro_batches >= 2 * stages - 1:  # the V waits only until the first message arrives
            simulation = run("zero_bubble_v", stages, micro_batches, 1, (1.0, 1.0, 1.0))
            assert simulation.gaps == (0.0,) * stages
            assert simulation.bubble == stages - 1 == formula(simulation, 1, (1.0, 1.0, 1.0))


@pytest.mark.slow
@given(st.integers(1, 6), st.integers(1, 12), SECONDS, SECONDS, SECONDS)
def test_formulas_that_hold_for_all_costs_do(
    stages: int, micro_batches: int, forward: float, inputs: float, weights: float
) -> None:
    seconds = (forward, inputs, weights)
    for name, virtual in [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]:
        simulation = run(name, stages, micro_batches, virtual, seconds)
        assert simulation.bubble == pytest.approx(formula(simulation, virtual, seconds))
    simulation = run("zero_bubble_v", stages, micro_batches, 1, seconds)
    assert simulation.bubble >= formula(simulation, 1, seconds) - 1e-9


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_each_refinement_shrinks_the_bubble(stages: int) -> None:
    """At equal halves, with the work of a stage the same for all (a stage of two chunks has half the cost in each)."""
    whole, half = (2.0, 2.0, 2.0), (1.0, 1.0, 1.0)
    micro_batches = 2 * stages
    flushed = run("1f1b", stages, micro_batches, 1, whole)
    looped = run("interleaved", stages, micro_batches, 2, half)
    split = run("zero_bubble", stages, micro_batches, 1, whole)
    vee = run("zero_bubble_v", stages, micro_batches, 1, half)
    assert vee.bubble < split.bubble < looped.bubble < flushed.bubble
    assert vee.bubble_share < 0.08


def test_events_follow_the_schedule_and_idle_is_what_is_left() -> None:
    simulation = run("1f1b", 2, 3, 1, (1.0, 1.0, 1.0))
    assert simulation.makespan == 12
    assert [(event.start, event.end) for event in simulation.events[1]] == [
        (1, 2), (2, 4), (4, 5), (5, 7), (7, 8), (8, 10),
    ]  # fmt: skip
    assert simulation.busy == (9, 9)
    assert simulation.idle == (0.25, 0.25)
    assert simulation.gaps == (3, 0)
    assert simulation.caches == (2, 1)


def test_unequal_stages_wait_for_the_slowest() -> None:
    schedule = build_schedule("1f1b", 2, 8)
    simulation = simulate(schedule, Costs((1.0, 3.0), (1.0, 3.0), (1.0, 3.0)))
    assert simulation.bubble == 1 + 2  # the first forward before and the last backward after the slow stage
    assert simulation.idle[0] > 0.6


def test_messages_take_their_latency_between_stages_only() -> None:
    simulation = simulate(build_schedule("gpipe", 3, 1), Costs.uniform(3, latency=0.5))
    assert simulation.makespan == 9 + 4 * 0.5
    assert simulate(build_schedule("zero_bubble_v", 1, 1), Costs.uniform(2, latency=0.5)).bubble == 0


def test_absent_micro_batches_take_no_time() -> None:
    schedule = build_schedule("interleaved", 4, 5, 2)
    assert schedule.micro_batches == 8
    costs = Costs.uniform(8)
    assert simulate(schedule, costs, present=5).busy == (5 * 2 * 3.0,) * 4
    assert simulate(schedule, costs, present=5).makespan < simulate(schedule, costs).makespan


def test_work_without_cost_has_no_bubble() -> None:
    simulation = run("1f1b", 2, 2, 1, (0.0, 0.0, 0.0))
    assert (simulation.bubble_share, simulation.idle) == (0.0, (0.0, 0.0))


def changed(schedule: Schedule, stage: int, program: list[Instruction]) -> Schedule:
    return replace(schedule, programs=(*schedule.programs[:stage], tuple(program), *schedule.programs[stage + 1 :]))


def refused(schedule: Schedule, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as caught:
        simulate(schedule, Costs.uniform(schedule.chunks))
    assert caught.value.status == ExitStatus.CONFIG


@given(st.sampled_from([n for n in SCHEDULES if n != "interleaved"]), st.data())
def test_a_missing_or_doubled_instruction_is_found(name: str, data: st.DataObject) -> None:
    schedule = build_schedule(name, 3, 4)
    stage = data.draw(st.integers(0, 2))
    program = list(schedule.programs[stage])
    place = data.draw(st.integers(0, len(program) - 1))
    refused(changed(schedule, stage, program[:place] + program[place + 1 :]), f"stage {stage}: .* is missing")
    refused(changed(schedule, stage, [*program, program[place]]), f"stage {stage}: .* is done twice")


def test_stages_that_wait_for_each_other_are_named() -> None:
    schedule = build_schedule("1f1b", 2, 2)
    late = [Instruction("forward", 0, 0), Instruction("backward", 0, 0), *schedule.programs[0][1:2]]
    early = [Instruction("forward", 1, 0), Instruction("forward", 1, 1), *schedule.programs[1][1::2]]
    cyclic = changed(changed(schedule, 1, early), 0, [*late, Instruction("backward", 0, 1)])
    refused(
        cyclic,
        "stage 0 waits in the backward of chunk 0, micro-batch 0, for the backward_input of chunk 1, micro-batch 0, "
        "on stage 1; stage 1 waits in the forward of chunk 1, micro-batch 1, for the forward of chunk 0, "
        "micro-batch 1, on stage 0",
    )


def test_a_dependency_later_in_the_own_program_is_named() -> None:
    schedule = build_schedule("zero_bubble", 2, 1)
    program = [Instruction(kind, 1, 0) for kind in ("forward", "backward_weights", "backward_input")]
    refused(changed(schedule, 1, program), "backward_weights .* for the backward_input .* later in its own program")


def test_backwards_out_of_order_are_refused() -> None:
    schedule = build_schedule("zero_bubble", 2, 3)
    swapped = list(schedule.programs[1])
    a, b = (swapped.index(Instruction("backward_weights", 1, micro)) for micro in (1, 2))
    swapped[a], swapped[b] = swapped[b], swapped[a]
    refused(
        changed(schedule, 1, swapped), "stage 1: backward_weights of chunk 1, micro-batch 1 comes after .* 2; .* asc"
    )


@pytest.mark.parametrize(
    ("instruction", "words"),
    [
        (Instruction("update", 1, 0), "unknown instruction 'update'"),
        (Instruction("forward", 0, 0), "not this stage's work"),
        (Instruction("forward", 1, 2), "not this stage's work"),
        (Instruction("forward", 2, 0), "not this stage's work"),
    ],
)
def test_foreign_instructions_are_refused(instruction: Instruction, words: str) -> None:
    schedule = build_schedule("1f1b", 2, 2)
    refused(changed(schedule, 1, [*schedule.programs[1], instruction]), f"stage 1: .*{words}")


def test_costs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 chunks were given, but the schedule has 2"):
        simulate(build_schedule("1f1b", 2, 2), Costs.uniform(3))
    with pytest.raises(ConfigError, match="2 for forward, 1 for backward_input"):
        Costs((1.0, 1.0), (1.0,), (1.0, 1.0))
    with pytest.raises(ConfigError, match=r"backward_input\[1\] is -1"):
        Costs((1.0, 1.0), (1.0, -1), (1.0, 1.0))
    with pytest.raises(ConfigError, match=r"latency\[0\] is nan"):
        Costs.uniform(2, latency=float("nan"))
    with pytest.raises(ConfigError, match="no formula for the schedule '2f2b'"):
        bubble_formula("2f2b", 2, 2, 1, Costs.uniform(2))
