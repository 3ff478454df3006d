"""Compose what a report tells about the time of a step: its phases by rank, and the timetable of its pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mpizero.train.report.findings import percent
from mpizero.train.report.history import RunHistory
from mpizero.train.report.markup import Markup, element, figure, folded, joined, key, long_table, scrolling, spot, table
from mpizero.train.report.measures import (
    MEANINGS,
    MeanPhases,
    idle_shares,
    last_timetable,
    last_with_phases,
    mean_phases,
    timed_ranks,
)
from mpizero.train.report.rank_pictures import MOST_RANKS, draw_phases, phase_colours
from mpizero.train.report.sections.columns import seconds_column
from mpizero.train.report.timetable_picture import MOST_CELLS, WORK, draw_timetable, kinds


def phases(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield the seconds of the measured steps by phase and rank."""
    visit = last_with_phases(history.visits)
    found = mean_phases(visit.phases) if visit else None
    if visit is None or found is None:
        yield element("p", "No step was measured: that needs a few steps, and a run of a version that records events.")
        return
    ranks = len(found.seconds)
    of = "" if len(history.visits) == 1 else f" of visit {visit.number}"
    steps = ", ".join(f"{step:,}" for step in found.steps[:8]) + (", …" if len(found.steps) > 8 else "")
    mean = f"the mean of {len(found.steps)} measured steps ({steps})"
    taken = f"measured in step {steps}, the only one that was measured" if len(found.steps) == 1 else mean
    label = f"Bars of the seconds of a step by phase, one bar for each of {ranks} ranks; the table has the numbers."
    drawn = figure(
        draw_phases(f"{name}-phases", label, found),
        f"Time of a step by phase and rank, {taken}{of}. Grey is "
        f"waiting for other ranks, in whatever phase.{few_ranks(ranks)}",
    )
    meanings = element("dl", *_meanings([phase for phase, taken in found.phases.items() if any(taken)]))
    yield beside(drawn, _phase_table(found), folded("What the phases are", meanings), *_waiting_table(found))


def _phase_table(found: MeanPhases) -> Markup:
    tints, ranks = phase_colours(found.phases), range(len(found.seconds))
    shown = {phase: taken for phase, taken in found.phases.items() if any(taken)}
    whole = {**shown, "whole step": found.seconds}
    longest = [max(ranks, key=taken.__getitem__) for taken in whole.values()]
    unit, numbers = seconds_column(
        [sum(taken) / len(taken) for taken in whole.values()]
        + [taken[rank] for taken, rank in zip(whole.values(), longest, strict=True)]
    )
    mean_step, rows = sum(found.seconds), []
    for place, (phase, taken) in enumerate(whole.items()):
        rank = longest[place]
        row = [joined([spot(tints[phase]), phase]) if phase in tints else phase, numbers[place]]
        row += [percent(sum(taken) / mean_step if mean_step else 0.0)]
        if len(ranks) > 1:
            share = taken[rank] / found.seconds[rank] if found.seconds[rank] else 0.0
            row += [numbers[len(whole) + place], str(rank), percent(share)]
        rows.append(row)
    head = ["phase", f"mean of ranks, {unit}", "share of the mean step"]
    head += [f"longest, {unit}", "on rank", "share of that rank's step"] if len(ranks) > 1 else []
    return table("Time of a step by phase", head, rows)


def _meanings(names: Sequence[str]) -> Iterator[Markup]:
    for name in names:
        if name in MEANINGS:
            yield element("dt", name)
            yield element("dd", MEANINGS[name])


def _waiting_table(found: MeanPhases) -> Iterator[Markup]:
    waits = found.phases["waiting"]
    if len(waits) > 1:
        ranks = sorted(range(len(waits)), key=lambda rank: -waits[rank])
        unit, waited = seconds_column([waits[rank] for rank in ranks])
        reading_unit, reading = seconds_column([found.reading[rank] for rank in ranks])
        rows = [
            (str(rank), waited[place], percent(found.waiting[rank]), reading[place]) for place, rank in enumerate(ranks)
        ]
        head = ("rank", f"waiting, {unit}", "share of its step", f"reading samples before the step, {reading_unit}")
        yield long_table("Waiting for other ranks, longest first", head, rows)


def beside(drawn: Markup, *more: Markup) -> Markup:
    """Return a figure and what is beside it where there is room, else below it."""
    return element("div", drawn, element("div", *more), class_="pictures")


def few_ranks(ranks: int) -> str:
    """Return that a picture does not show all ranks, if so."""
    return f" {MOST_RANKS} of {ranks} ranks are drawn." if ranks > MOST_RANKS else ""


def pipeline(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield the last timetable as planned and as measured, and the idle share of each stage."""
    found = last_timetable(history.visits)
    if found is None:
        return
    start, last = found
    planned, measured = idle_shares(last.planned), idle_shares(last.measured)
    cells, ranks = len(last.planned) + len(last.measured), timed_ranks(start)
    costs = "as long as the operations of its blocks" if last.costs == "operations" else "equally long"
    whose = f", on the clocks of ranks {', '.join(map(str, ranks))}, one of each stage" if ranks else ""
    if cells <= MOST_CELLS:
        label = (
            f"Timetable of {len(measured)} pipeline stages, planned above and measured below; the table has numbers."
        )
        yield figure(
            scrolling(draw_timetable(f"{name}-timetable", label, last), "Timetable", "long"),
            f"Step {last.step:,} of the first replica under the schedule {last.schedule}{whose}. In the plan each pass "
            f"is {costs}, and messages take no time. A measured pass lasts from its start, when what it needs from "
            "another stage has arrived, to its end: messages inside it, and waiting for ranks of the same stage, are "
            "part of it. Numbers are those of micro-batches; white is idle.",
            key(WORK[work] for work in kinds([*last.planned, *last.measured])),
        )
    else:
        yield element("p", f"The timetable of {cells:,} passes is too long to be drawn.")
    rows = [
        (str(stage), percent(planned[stage]) if stage < len(planned) else "-", percent(share))
        for stage, share in enumerate(measured)
    ]
    yield table(
        "Share of the time from the first pass to the last in which a stage is in no pass",
        ("stage", "planned", "measured"),
        rows,
    )
