"""Compose what a report tells about one run beside its curves, a section for each kind of record."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpizero.train.number_format import amount, duration
from mpizero.train.record.events import VisitStart
from mpizero.train.record.reader import VisitRecords
from mpizero.train.report.findings import counted, described_resume, percent, reason
from mpizero.train.report.layout_drawing import described_layout, draw_layout
from mpizero.train.report.markup import Markup, element, figure, joined, key, listed, section, spot, table
from mpizero.train.report.measures import (
    MEANINGS,
    MemoryTable,
    idle_shares,
    last_with_memory,
    last_with_phases,
    mean_phases,
    memory_tables,
)
from mpizero.train.report.rank_pictures import MOST_RANKS, colours, draw_memory, draw_phases
from mpizero.train.report.story import RunStory, flattened
from mpizero.train.report.timetable_picture import MOST_CELLS, WORK, draw_timetable, kinds

#: Rows of a table of steps or checkpoints at most: the first and the last ones.
_MOST_ROWS = 24


def run_sections(story: RunStory, number: int = 0, level: int = 2) -> Iterator[Markup]:
    """Yield the sections of one run; ``number`` tells runs of one page apart, ``level`` is that of headings."""
    contents = [
        ("Skipped steps", _skips(story)),
        ("Visits and resumes", _visits(story)),
        ("Where the time goes", _phases(story, f"run-{number}")),
        ("Memory", _memory(story, f"run-{number}")),
        ("Layout", _layout(story)),
        ("Pipeline", _pipeline(story, f"run-{number}")),
        ("Checkpoints", _checkpoints(story)),
        ("Environment", _environment(story)),
    ]
    for title, content in contents:
        yield section(title, *content, level=level)


def _skips(story: RunStory) -> Iterator[Markup]:
    if story.skips:
        rows = []
        for skip in story.skips:
            dump = f"bad_steps/step_{skip.step:08d}"
            replay = f"mpizero replay {story.name}/{dump}" if (story.records.folder / dump).is_dir() else "not kept"
            rows.append((f"{skip.step:,}", reason(skip), replay))
        yield table(
            "Skipped steps: parameters and optimizer state stayed as they were",
            ("step", "why; samples of the global batch", "a look at the samples"),
            _cut(rows),
        )


def _cut(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    if len(rows) <= _MOST_ROWS:
        return list(rows)
    half = _MOST_ROWS // 2
    gap = ("…", f"{len(rows) - 2 * half:,} more", *[""] * (len(rows[0]) - 2))
    return [*rows[:half], gap, *rows[-half:]]


def _visits(story: RunStory) -> Iterator[Markup]:
    if len(story.visits) < 2:
        return
    rows = []
    for visit in story.visits:
        start, end = visit.start, visit.end
        if start is not None:
            how = {"done": "complete"}.get(end.reason, end.reason) if end else "no end recorded: killed, probably"
            if visit is story.last and end is None and story.state == "running":
                how = "running"
            why = f": {end.message}" if end and end.message else ""
            until = "?" if (step := story.last_step(visit)) is None else f"{step:,}"
            rows.append((str(visit.number), f"{start.step + 1:,}", until, described_layout(start), f"{how}{why}"))
    yield table("A visit is one start or resume", ("visit", "first step", "last step", "layout", "end"), _cut(rows))
    yield listed(described_resume(resume) for resume in story.resumes[-_MOST_ROWS:])


def _phases(story: RunStory, name: str) -> Iterator[Markup]:
    visit = last_with_phases(story.visits)
    found = mean_phases(visit.phases) if visit else None
    if found is None:
        yield element("p", "No step was measured: that needs a few steps, and a run of a version that records events.")
        return
    tints, ranks = colours(list(found.phases)), range(len(found.seconds))
    rows = []
    for phase, taken in found.phases.items():
        if any(taken):
            worst = max(ranks, key=taken.__getitem__)
            rows.append(
                (
                    joined([spot(tints[phase]), phase]),
                    duration(sum(taken) / len(taken)),
                    f"{duration(taken[worst])} (rank {worst})",
                    percent(taken[worst] / found.seconds[worst] if found.seconds[worst] else 0.0),
                    MEANINGS.get(phase, ""),
                )
            )
    steps = ", ".join(f"{step:,}" for step in found.steps[:8]) + (", …" if len(found.steps) > 8 else "")
    label = (
        f"Bars of the seconds of a step by phase, one bar for each of {len(ranks)} ranks; the table has the numbers."
    )
    drawn = figure(
        draw_phases(f"{name}-phases", label, found),
        f"Time of a step by phase and rank, the mean of {counted(len(found.steps), 'measured step')} ({steps}) of the "
        f"last visit. Grey is waiting for other ranks, in whatever phase." + _few_ranks(len(ranks)),
    )
    tables = [table("Seconds by phase", ("phase", "mean of ranks", "most", "of its step", "what it is"), rows)]
    if len(ranks) > 1:
        waits = [
            (
                f"rank {rank}",
                percent(found.waiting[rank]),
                duration(found.phases["waiting"][rank]),
                duration(found.reading[rank]),
            )
            for rank in sorted(ranks, key=lambda rank: -found.waiting[rank])
        ]
        head = ("rank", "share of the step", "waiting", "reading samples, before the step")
        tables.append(table("Waiting by rank, most first", head, _cut(waits)))
    yield _beside(drawn, *tables)


def _beside(drawn: Markup, *more: Markup) -> Markup:
    """Return a figure and what is beside it where there is room, else below it."""
    return element("div", drawn, element("div", *more), class_="pictures")


def _few_ranks(ranks: int) -> str:
    return f" {MOST_RANKS} of {ranks} ranks are drawn." if ranks > MOST_RANKS else ""


def _memory(story: RunStory, name: str) -> Iterator[Markup]:
    visit = last_with_memory(story.visits)
    for kind, found in memory_tables(visit.start, visit.memory).items() if visit else ():
        ranks = len(next(iter((*found.planned.values(), *found.counted.values()))))
        where = "on the host" if kind == "host" else "on GPUs"
        label = f"Bars of planned and counted memory by part, for each of {ranks} ranks; the table has the numbers."
        drawn = figure(
            draw_memory(f"{name}-memory-{kind}", label, found),
            f"Memory {where} by rank: planned (hatched), and counted where it is allocated, after step 1 (solid)."
            + _few_ranks(ranks),
        )
        yield _beside(drawn, _memory_table(found, where))
    if visit and visit.memory:
        peak, resident = visit.memory.peak, visit.memory.resident
        yield element(
            "p",
            f"The library's own arrays took at most {amount(max(peak))}B at once (rank {peak.index(max(peak))}); the "
            f"largest process had {amount(max(resident))}B of resident memory, with Python, libraries and shared pages "
            f"(rank {resident.index(max(resident))}).",
        )
    if visit and visit.start and visit.start.not_planned:
        yield element("p", f"The plan is not whole: {visit.start.not_planned}.")


def _memory_table(found: MemoryTable, where: str) -> Markup:
    tints, rows = colours(found.parts), []
    for part in found.parts:
        planned, counted = found.planned.get(part), found.counted.get(part)
        largest = max(range(len(planned or counted or ())), key=(planned or counted or [0]).__getitem__)
        rows.append(
            (
                joined([spot(tints[part]), part]),
                *(f"{amount(sum(sizes))}B" if sizes else "-" for sizes in (planned, counted)),
                *(f"{amount(sizes[largest])}B" if sizes else "-" for sizes in (planned, counted)),
                str(largest),
            )
        )
    if totals := found.totals():
        planned_sum, counted_sum = (sum(column) for column in zip(*totals, strict=True))
        rank = max(range(len(totals)), key=lambda r: totals[r][0])
        rows.append(
            (
                "all that are compared",
                f"{amount(planned_sum)}B",
                f"{amount(counted_sum)}B",
                f"{amount(totals[rank][0])}B",
                f"{amount(totals[rank][1])}B",
                str(rank),
            )
        )
    head = ("part", "planned, all ranks", "counted, all ranks", "planned, largest", "counted, same rank", "rank")
    return table(
        f"Memory {where} by part; parts that exist only while a step runs are planned, and not counted", head, rows
    )


def _layout(story: RunStory) -> Iterator[Markup]:
    start = story.start
    if start is None:
        return
    facts = [described_layout(start).capitalize() + "."]
    layout = start.layout
    if layout.get("grains"):
        facts.append(
            f"A step has {layout.get('global_batch')} samples in {layout['grains']} grains of "
            f"{layout.get('grain_size')}; a replica computes whole grains."
        )
    if layout.get("exactness"):
        facts.append(f"Results are equal to {layout['exactness']}.")
    drawing = element("div", draw_layout(start), role="group", aria_label="Drawing of the layout")
    yield figure(drawing, f"{' '.join(facts)} The frame of a rank has the colour of its node.")
    chunks = [chunk for chunk in layout.get("chunks") or () if isinstance(chunk, Mapping)]
    if len(chunks) > 1:
        rows = [(f"chunk {n}", f"stage {c.get('stage')}", _blocks(c.get("blocks"))) for n, c in enumerate(chunks)]
        yield table("What each stage of the pipeline computes", ("chunk", "stage", "blocks"), rows)


def _blocks(blocks: Any) -> str:
    names = [str(name) for name in blocks] if isinstance(blocks, list) else []
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"


def _pipeline(story: RunStory, name: str) -> Iterator[Markup]:
    found = [one for visit in story.visits for one in visit.timetables]
    if not found:
        return
    last = found[-1]
    planned, measured = idle_shares(last.planned), idle_shares(last.measured)
    cells = len(last.planned) + len(last.measured)
    costs = "as long as the operations of its blocks" if last.costs == "operations" else "equally long"
    if cells <= MOST_CELLS:
        label = (
            f"Timetable of {len(measured)} pipeline stages, planned above and measured below; the table has numbers."
        )
        yield figure(
            element("div", draw_timetable(f"{name}-timetable", label, last), class_="wide long", tabindex=0),
            f"One step (step {last.step:,}) of the first replica under the schedule {last.schedule}. In the plan each "
            f"pass is {costs}, and messages take no time. Numbers are those of micro-batches; white is idle.",
            key(WORK[work] for work in kinds([*last.planned, *last.measured])),
        )
    else:
        yield element("p", f"The timetable of {cells:,} passes is too long to be drawn.")
    rows = [
        (f"stage {stage}", percent(planned[stage]) if stage < len(planned) else "-", percent(share))
        for stage, share in enumerate(measured)
    ]
    yield table("Share of the step in which a stage is idle", ("stage", "planned", "measured"), rows)


def _checkpoints(story: RunStory) -> Iterator[Markup]:
    written = [event for visit in story.visits for event in visit.checkpoints]
    if not story.visits:
        return
    if not written:
        yield element("p", "No checkpoint was written.")
        return
    rows = [
        (
            f"{one.step:,}",
            one.path,
            f"{amount(one.bytes)}B",
            duration(one.seconds) + (" beside the training" if one.beside else ""),
            "best so far" if one.best else "",
            "kept" if (story.records.folder / one.path).is_dir() else "removed since",
        )
        for one in written
    ]
    yield table("Checkpoints that were written", ("step", "path", "size", "written in", "", "now"), _cut(rows))


def _environment(story: RunStory) -> Iterator[Markup]:
    if (start := story.start) is None:
        yield element(
            "p", "Environment, layout, memory and phases are not recorded: a version without events has run it."
        )
        return
    yield table("Environment of the last visit", (), environment(start).items())


def environment(start: VisitStart) -> dict[str, str]:
    """Return versions, hosts and the machine of a visit by name."""
    hosts = ", ".join(map(str, start.hosts[:8])) + (f" and {len(start.hosts) - 8} more" if len(start.hosts) > 8 else "")
    found = {"hosts": hosts} | {
        str(name): str(value) for name, value in start.machine.items() if value not in ("", None)
    }
    return found | {str(name): str(value) for name, value in start.versions.items()}


def settings(visit: VisitRecords | VisitStart | None) -> dict[str, str]:
    """Return all settings of a configuration by name, as text; empty without a record."""
    start = visit.start if isinstance(visit, VisitRecords) else visit
    return {} if start is None else {name: shown(value) for name, value in flattened(start.config).items()}


def shown(value: Any) -> str:
    """Return a setting as text, as TOML writes it."""
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
