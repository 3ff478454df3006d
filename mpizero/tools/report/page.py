"""Compose the report of one or several runs: one HTML file that loads no other file.

:func:`seconds_column` and :func:`bytes_column` give all numbers of a column one unit and the same number of decimals.
Other functions compose one part of a page each: :func:`phases` the time of a step by rank, :func:`pipeline` the
timetable, :func:`memory` planned and counted bytes by part and rank, :func:`run_sections` all records of a run, with a
section for each kind of record, :func:`curve_section` the curves, each run in its colour, and :func:`differences` the
settings and the environment in which runs differ. :func:`glossary` explains the words that occur in a page.
:func:`report` makes a page of these parts and writes it; :data:`STYLE` is its CSS.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpizero._util.checks import home_path
from mpizero._util.text import PREFIXES, amount, duration, write_atomic
from mpizero.checkpoint.inspect import flat
from mpizero.errors import ConfigError, ExitStatus, MpizeroError
from mpizero.tools.report.figures import (
    COLOURS,
    GROUPS,
    INK,
    MOST_CELLS,
    MOST_POINTS,
    MOST_RANKS,
    SKIPPED,
    VALIDATION,
    WORK,
    Curve,
    Markers,
    Markup,
    colours_of,
    definitions,
    described_layout,
    draw_curves,
    draw_layout,
    draw_memory,
    draw_phases,
    draw_timetable,
    element,
    figure,
    folded,
    is_uneven,
    joined,
    key,
    kinds,
    listed,
    long_table,
    lower_end,
    scrolling,
    section,
    spot,
    table,
)
from mpizero.tools.report.history import (
    MEANINGS,
    MeanPhases,
    MemoryTable,
    RunHistory,
    counted,
    described_resume,
    findings,
    idle_fractions,
    last_timetable,
    last_with_memory,
    last_with_phases,
    mean_phases,
    memory_tables,
    percent,
    reason,
    speed_text,
    timed_ranks,
)
from mpizero.train.events import SessionStart, read_run


def seconds_column(values: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest of ``values`` (seconds), and all values formatted in this unit."""
    return ("ms", _formatted(values, 1e-3)) if max(values, default=0.0) < 1 else ("s", _formatted(values, 1.0))


def bytes_column(values: Sequence[float]) -> tuple[str, list[str]]:
    """Return the unit that fits the largest of ``values`` (bytes), and all values formatted in this unit."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if max(values, default=0.0) >= s), PREFIXES[-1])
    return f"{prefix}B", _formatted(values, scale) if prefix else [f"{value:,.0f}" for value in values]


def _formatted(values: Sequence[float], scale: float) -> list[str]:
    """Format numbers so that the largest has four digits or more; one that would round to 0 becomes "< 0.001", say."""
    largest = max(values, default=0.0) / scale
    digits = min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest > 0 else 0
    least = 10.0**-digits
    return [
        f"< {least:.{digits}f}" if 0 < value / scale < least / 2 else f"{value / scale:,.{digits}f}" for value in values
    ]


def phases(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield a picture and tables of the seconds of the measured steps, by phase and rank."""
    session = last_with_phases(history.sessions)
    means = mean_phases(session.phases) if session else None
    if session is None or means is None:
        yield element("p", "No step was measured: that needs a few steps, and a run of a version that records events.")
        return
    ranks = len(means.seconds)
    of = "" if len(history.sessions) == 1 else f" of session {session.number}"
    steps = ", ".join(f"{step:,}" for step in means.steps[:8]) + (", …" if len(means.steps) > 8 else "")
    mean = f"the mean of {len(means.steps)} measured steps ({steps})"
    taken = f"measured in step {steps}, the only one that was measured" if len(means.steps) == 1 else mean
    label = f"Bars of the seconds of a step by phase, one bar for each of {ranks} ranks; the table has the numbers."
    drawn = figure(
        draw_phases(f"{name}-phases", label, means),
        f"Time of a step by phase and rank, {taken}{of}. Grey is "
        f"waiting for other ranks, in whatever phase.{few_ranks(ranks)}",
    )
    known = ((phase, MEANINGS[phase]) for phase, taken in means.phases.items() if any(taken) and phase in MEANINGS)
    yield beside(drawn, _phase_table(means), folded("What the phases are", definitions(known)), *_waiting_table(means))


def _phase_table(means: MeanPhases) -> Markup:
    tints, ranks = colours_of(means.phases), range(len(means.seconds))
    present = {phase: taken for phase, taken in means.phases.items() if any(taken)}
    lines = {**present, "whole step": means.seconds}
    longest = [max(ranks, key=taken.__getitem__) for taken in lines.values()]
    rank_means = [sum(taken) / len(taken) for taken in lines.values()]
    most = [taken[rank] for taken, rank in zip(lines.values(), longest, strict=True)]
    unit, numbers = seconds_column([*rank_means, *most])
    mean_step, rows = sum(means.seconds), []
    for index, (phase, taken) in enumerate(lines.items()):
        rank = longest[index]
        row = [joined([spot(tints[phase]), phase]) if phase in tints else phase, numbers[index]]
        row += [percent(sum(taken) / mean_step if mean_step else 0.0)]
        if len(ranks) > 1:
            fraction = taken[rank] / means.seconds[rank] if means.seconds[rank] else 0.0
            row += [numbers[len(lines) + index], str(rank), percent(fraction)]
        rows.append(row)
    head = ["phase", f"mean of ranks, {unit}", "share of the mean step"]
    head += [f"longest, {unit}", "on rank", "share of that rank's step"] if len(ranks) > 1 else []
    return table("Time of a step by phase", head, rows)


def _waiting_table(means: MeanPhases) -> Iterator[Markup]:
    waits = means.phases["waiting"]
    if len(waits) > 1:
        ranks = sorted(range(len(waits)), key=lambda rank: -waits[rank])
        unit, waited = seconds_column([waits[rank] for rank in ranks])
        reading_unit, reading = seconds_column([means.reading[rank] for rank in ranks])
        fractions = [percent(means.waiting[rank]) for rank in ranks]
        head = ("rank", f"waiting, {unit}", "share of its step", f"reading samples before the step, {reading_unit}")
        rows = list(zip(map(str, ranks), waited, fractions, reading, strict=True))
        yield long_table("Waiting for other ranks, longest first", head, rows)


def beside(drawn: Markup, *more: Markup) -> Markup:
    """Return the figure ``drawn`` with further content (``more``) beside it, or below it on a narrow page."""
    return element("div", drawn, element("div", *more), class_="pictures")


def few_ranks(ranks: int) -> str:
    """Return a sentence if a picture does not show all ranks; else ""."""
    return f" {MOST_RANKS} of {ranks} ranks are drawn." if ranks > MOST_RANKS else ""


def pipeline(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield the last timetable, planned and measured, and the fraction of idle time of each pipeline stage."""
    timetable = last_timetable(history.sessions)
    if timetable is None:
        return
    start, last = timetable
    planned, measured = idle_fractions(last.planned), idle_fractions(last.measured)
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
        (str(stage), percent(planned[stage]) if stage < len(planned) else "-", percent(fraction))
        for stage, fraction in enumerate(measured)
    ]
    caption = "Share of the time from the first pass to the last in which a stage is in no pass"
    yield table(caption, ("stage", "planned", "measured"), rows)


def memory(history: RunHistory, name: str) -> Iterator[Markup]:
    """Yield pictures and tables of the memory of hosts and GPUs."""
    session = last_with_memory(history.sessions)
    for kind, sizes in memory_tables(session.start, session.memory).items() if session else ():
        ranks = len(next(iter((*sizes.planned.values(), *sizes.counted.values()))))
        where = "on the host" if kind == "host" else "on GPUs"
        label = f"Bars of planned and counted memory by part, for each of {ranks} ranks; the table has the numbers."
        present = ["planned (hatched)"] if sizes.planned else []
        present += ["counted where it is allocated, after the session's first step (solid)"] if sizes.counted else []
        caption = f"Memory {where} by rank: {', and '.join(present)}.{few_ranks(ranks)}"
        yield beside(figure(draw_memory(f"{name}-memory-{kind}", label, sizes), caption), _memory_table(sizes, where))
    if session and session.memory:
        peak, resident = session.memory.peak, session.memory.resident
        most, largest = peak.index(max(peak)), resident.index(max(resident))
        beside_it = " Group buffers are not in this figure." if "group buffers" in session.memory.counted else ""
        yield element(
            "p",
            f"Until the end of the session's first step, rank {most} had the most arrays of the library's own at once: "
            f"{amount(peak[most])}B.{beside_it} The largest process is that of rank {largest}: "
            f"{amount(resident[largest])}B of resident memory, with Python, libraries and shared pages.",
        )
    if session and session.start and session.start.not_planned:
        yield element("p", f"The plan is not whole: {session.start.not_planned}.")


def _memory_table(memory: MemoryTable, where: str) -> Markup:
    """Return a table of each part of memory: bytes of all ranks together, and of the rank with most bytes."""
    tints, columns, names = colours_of(memory.parts), [], []
    for part in memory.parts:
        names.append(joined([spot(tints[part]), part]))
        columns.append((memory.planned.get(part), memory.counted.get(part)))
    if totals := memory.totals():
        names.append(Markup("total of parts in both" if memory.only_planned or memory.only_counted else "total"))
        columns.append(([planned for planned, _ in totals], [counted for _, counted in totals]))
    if memory.counted and (memory.only_counted or not totals):
        names.append(Markup("total counted"))
        columns.append((None, [sum(sizes) for sizes in zip(*memory.counted.values(), strict=True)]))
    ranks = [max(range(len(known)), key=known.__getitem__) for p, c in columns if (known := p or c or [0])]
    heads, cells = ["part"], []
    for whose in ("all ranks", "one rank"):
        for kind, sizes in (("planned", [p for p, _ in columns]), ("counted", [c for _, c in columns])):
            if any(sizes):
                chosen = [
                    None if by_rank is None else sum(by_rank) if whose == "all ranks" else by_rank[rank]
                    for by_rank, rank in zip(sizes, ranks, strict=True)
                ]
                unit, texts = _cells(chosen)
                heads.append(f"{kind}, {whose}, {unit}")
                cells.append(texts)
    missing = f"; {', '.join(memory.only_planned)} exist only while a step runs" if memory.only_planned else ""
    rows = zip(names, *cells, map(str, ranks), strict=True)
    return table(f"Memory {where} by part{missing}", [*heads, "the rank with most"], rows)


def _cells(sizes: Sequence[int | None]) -> tuple[str, list[str]]:
    """Return the unit and the cells of a column of sizes; the cell is "-" for a missing size."""
    unit, texts = bytes_column([size or 0 for size in sizes])
    return unit, ["-" if size is None else text for size, text in zip(sizes, texts, strict=True)]


#: Beginning of a record that says that results are exact.
_BITS = "the bits of one process"
#: The most resumes that are described one by one.
_MOST_RESUMES = 24
#: Names of facts about the environment: in the records, and on the page.
_FACTS = {
    "cores": "cores that rank 0 may use",
    "threads": "threads per rank",
    "job": "Slurm job",
    "python": "Python",
    "mpi": "MPI",
    "hdf5": "HDF5",
    "blas": "BLAS",
}


def run_sections(history: RunHistory, number: int = 0, level: int = 2, *, machine: bool = True) -> Iterator[Markup]:
    """Yield the sections of one run.

    Parameters
    ----------
    history : RunHistory
        The run.
    number : int
        Number of the run among the runs on the page, from 0.
    level : int
        Level of the headings.
    machine : bool
        Whether there is a section about the environment.
    """
    contents = [
        ("Skipped steps", _skips(history)),
        ("Sessions and resumes", _sessions(history)),
        ("Where the time goes", phases(history, f"run-{number}")),
        ("Memory", memory(history, f"run-{number}")),
        ("Layout", _layout(history)),
        ("Pipeline", pipeline(history, f"run-{number}")),
        ("Checkpoints", _checkpoints(history)),
        ("Environment", _environment(history) if machine else ()),
    ]
    for title, content in contents:
        yield section(title, *content, level=level, name=f"run-{number}-{title.lower().replace(' ', '-')}")


def _skips(history: RunHistory) -> Iterator[Markup]:
    if not history.skips:
        return
    rows, saved = [], 0
    for skip in history.skips:
        dump = f"bad_steps/step_{skip.step:08d}"
        is_saved = (history.records.folder / dump).is_dir()
        saved += is_saved
        command = f"mpizero replay {history.name}/{dump}" if is_saved else "not kept"
        rows.append((f"{skip.step:,}", reason(skip), command))
    sentences = [f"The samples of {counted(saved, 'step')} are kept"]
    sentences[0] += "; a run keeps those of its first bad steps only." if 0 < saved < len(rows) else "."
    if saved:
        above = history.records.folder.resolve().parent
        sentences.append(f"The commands look at them, and are to be run in {above}.")
    bad_ranks = [{int(one.get("rank", -1)) for one in skip.event.found} for skip in history.skips if skip.event]
    ranks = Counter(rank for one in bad_ranks for rank in one)
    if len(ranks) > 1:
        each = ", ".join(f"{count:,} on rank {rank}" for rank, count in sorted(ranks.items()))
        sentences.append(f"Steps by rank that found a value: {each}.")
    yield element("p", " ".join(sentences))
    caption = "Skipped steps, which left parameters and optimizer state as they were"
    yield long_table(caption, ("step", "why; samples of the global batch", "command to inspect"), rows)


def _sessions(history: RunHistory) -> Iterator[Markup]:
    if len(history.sessions) < 2:
        return
    rows = []
    for session in history.sessions:
        start, end = session.start, session.end
        if start is not None:
            how = {"done": "complete"}.get(end.reason, end.reason) if end else "no end recorded: killed, probably"
            if session is history.last and end is None and history.state == "running":
                how = "running"
            why = f": {end.message}" if end and end.message else ""
            until = "?" if (step := history.last_step(session)) is None else f"{step:,}"
            rows.append((str(session.number), f"{start.step + 1:,}", until, described_layout(start), f"{how}{why}"))
    yield long_table("A session is one start or resume", ("session", "first step", "last step", "layout", "end"), rows)
    yield listed(described_resume(resume) for resume in history.resumes[-_MOST_RESUMES:])


def _layout(history: RunHistory) -> Iterator[Markup]:
    start = history.start
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
        facts.append(_exactness(str(layout["exactness"])))
    drawing = element("div", draw_layout(start), role="group", aria_label="Drawing of the layout")
    yield figure(drawing, f"{' '.join(facts)} The frame of a rank has the colour of its node.")
    chunks = [chunk for chunk in layout.get("chunks") or () if isinstance(chunk, Mapping)]
    if len(chunks) > 1:
        rows = [(str(n), str(c.get("stage")), _blocks(c.get("blocks"))) for n, c in enumerate(chunks)]
        yield table("What each stage of the pipeline computes", ("chunk", "stage", "blocks"), rows)


def _exactness(text: str) -> str:
    """Return a sentence that says whether results are the same bits as those of a single process."""
    if text.startswith(_BITS):
        return f"Results are bit for bit those of a single process{text.removeprefix(_BITS)}."
    return f"Results are those of a single process {text}."


def _blocks(blocks: Any) -> str:
    names = [str(name) for name in blocks] if isinstance(blocks, list) else []
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"


def _checkpoints(history: RunHistory) -> Iterator[Markup]:
    written = [event for session in history.sessions for event in session.checkpoints]
    if not history.sessions:
        return
    if not written:
        yield element("p", "No checkpoint was written.")
        return
    unit, sizes = bytes_column([one.bytes for one in written])
    time_unit, times = seconds_column([one.seconds for one in written])
    custom_paths = any(one.path != f"checkpoints/step_{one.step:08d}" for one in written)
    columns = {"step": [f"{one.step:,}" for one in written]}
    columns |= {"path": [one.path for one in written]} if custom_paths else {}
    columns |= {f"size, {unit}": sizes, f"written in, {time_unit}": times}
    for name, marked in (("beside the training", "beside"), ("best so far", "best")):
        if any(flags := [getattr(one, marked) for one in written]):
            columns[name] = ["yes" if is_so else "no" for is_so in flags]
    there = ((history.records.folder / one.path).is_dir() for one in written)
    columns["now"] = ["kept" if is_there else "removed since" for is_there in there]
    where = "" if custom_paths else f", such as {written[-1].path}"
    yield long_table(
        f"Checkpoints that were written{where}", [*columns], [*zip(*columns.values(), strict=True)], ends=3
    )


def _environment(history: RunHistory) -> Iterator[Markup]:
    if (start := history.start) is None:
        message = "Environment, layout, memory and phases are not recorded: a version without events has run it."
        yield element("p", message)
        return
    yield table(f"Environment{of_last_session(history)}", (), environment(start).items())


def of_last_session(history: RunHistory) -> str:
    """Return " of the last session" if the run had several sessions; else ""."""
    return " of the last session" if len(history.sessions) > 1 else ""


def environment(start: SessionStart) -> dict[str, str]:
    """Return versions, hosts and the machine of a session by name."""
    hosts = ", ".join(map(str, start.hosts[:8])) + (f" and {len(start.hosts) - 8} more" if len(start.hosts) > 8 else "")
    facts = {"hosts": hosts} | {name: str(value) for name, value in start.machine.items() if value not in ("", None)}
    facts |= {name: str(value) for name, value in start.versions.items()}
    if "blas" in facts:
        facts["blas"] = re.sub(r" for (\w+)$", r" (kernel \1)", facts["blas"])
    return {_FACTS.get(name, name): value for name, value in facts.items()}


def configuration(history: RunHistory) -> Markup:
    """Return a folded table of all settings of a run's last session; empty if they are not recorded."""
    chosen = settings(history.start)
    title = f"{len(chosen)} settings{of_last_session(history)}"
    return folded(title, table(title, ("setting", "value"), sorted(chosen.items()))) if chosen else Markup("")


def settings(start: SessionStart | None) -> dict[str, str]:
    """Return all settings of a session by name, as text; empty if the session's start is not recorded (None)."""
    return {} if start is None else {name: setting_text(value) for name, value in flat(start.config).items()}


def setting_text(value: Any) -> str:
    """Return a setting as text, as TOML writes it."""
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)


#: Metrics that are drawn in a fixed place, or not at all.
_PLACED = {"step", "loss", "validation_loss", "learning_rate", "gradient_norm", "bytes_sent", "memory"}
#: Suffixes of titles of pictures.
_CHECKED, _UNCLIPPED = " (validation)", ", before clipping"
#: The most other metrics that are drawn.
_MOST_OTHERS = 8


def colour_of(number: int) -> str:
    """Return the colour of the run with this number on a page."""
    return COLOURS[number % len(COLOURS)]


def curve_section(histories: Sequence[RunHistory], *above: Markup) -> Markup:
    """Return a section with the curves of all metrics of all runs, and the content ``above`` before the curves."""
    drawn = [_losses(histories), *_single(histories)]
    return section("Curves", *above, *_notes(histories), element("div", *drawn, class_="pictures"), name="curves")


def _curve(histories: Sequence[RunHistory], number: int, name: str, *, dots: bool = False) -> Curve:
    """Return the curve of a metric of a run, with marks at the run's skipped steps and resumes."""
    history, colour = histories[number], colour_of(number) if len(histories) > 1 else None
    markers = Markers([s.step for s in history.skips], [resume.first for resume in history.resumes], colour or SKIPPED)
    return Curve(*history.series(name), colour or INK, dots=dots, name=history.name, markers=markers)


def _notes(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    several, sentences = len(histories) > 1, []
    if any(history.skips for history in histories):
        colour = "in the colour of their run" if several else "red"
        sentences.append(f"Triangles on the axis are skipped steps ({colour}).")
    if any(history.resumes for history in histories):
        sentences.append("Dotted lines are resumes.")
    if any(len(history.records.steps) > MOST_POINTS for history in histories):
        sentences.append(
            f"Curves of more than {MOST_POINTS:,} steps are drawn in {GROUPS} groups of neighbouring steps: the line "
            "is the mean of each group, and the pale band goes from its least to its largest value."
        )
    if sentences:
        yield element("p", " ".join(sentences))


def _losses(histories: Sequence[RunHistory]) -> Markup:
    numbers = range(len(histories))
    curves = [_curve(histories, number, "loss") for number in numbers]
    for number in numbers:
        checked = _curve(histories, number, "validation_loss", dots=True)
        if checked.steps:
            curves.append(checked if len(histories) > 1 else replace(checked, colour=VALIDATION))
    if not any(value == value for curve in curves for value in curve.values):
        begun = any(curve.steps for curve in curves)
        return element("p", "No loss was finite." if begun else "No step has been recorded yet.")
    validated = any(curve.dots for curve in curves)
    caption = "The loss of the training is the mean over the global batch."
    if validated and len(histories) > 1:
        caption += " Lines: training; dots, dashed: validation."
    names = [(INK, "training"), (VALIDATION, "validation (dots, dashed)")] if validated and len(histories) == 1 else []
    return _drawn("loss", "Loss", curves, histories, caption, *([key(names)] if names else []), wide=True)


def _drawn(
    name: str,
    title: str,
    curves: Sequence[Curve],
    histories: Sequence[RunHistory],
    caption: str,
    *more: Markup,
    wide: bool,
) -> Markup:
    """Return a picture with its title above, and with a caption and notes about its axes below."""
    notes = [caption] if caption else []
    if (limit := lower_end(curves, wide=wide)) is not None:
        notes.append(f"The axis ends at {limit:.1g}: smaller values, of less than one step in a hundred, are below it.")
    if is_uneven(curves):
        notes.append("Steps are on a logarithmic axis, as the runs have very different lengths.")
    if without := [history.name for history in histories if history.name not in {curve.name for curve in curves}]:
        notes.append(f"Not recorded by {', '.join(without)}.")
    label = f"Curve: {title} by step. {_range(curves)}"
    quantity = title.removesuffix(_CHECKED).removesuffix(_UNCLIPPED)
    if not (quantity.isascii() and quantity.isprintable()):
        quantity = ""  # matplotlib's font may lack its characters; the title above uses the page's font
    drawn = draw_curves(name, label, curves, quantity[:1].lower() + quantity[1:], wide=wide)
    return figure(joined([element("p", title, class_="title"), drawn]), " ".join(notes), *more)


def _single(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    known = {"learning_rate": "Learning rate", "gradient_norm": f"Norm of the gradient{_UNCLIPPED}"}
    names = dict.fromkeys(name for history in histories for name in history.metric_names())
    rates = [name for name in names if name.endswith("_per_second")]
    others = [name for name in names if name not in _PLACED and name not in rates]
    for index, name in enumerate([*known, *rates, *others[:_MOST_OTHERS]]):
        title = known.get(name, name.replace("_per_second", " a second").replace("_", " "))
        title = title[:1].upper() + title[1:]
        # whether all runs have this metric only in steps with a validation
        checked = all(set(h.series(name)[0]) <= set(h.series("validation_loss")[0]) for h in histories)
        curves = []
        for number, history in enumerate(histories):
            curve = _curve(histories, number, name, dots=2 * len(history.series(name)[0]) < len(history.records.steps))
            if any(value == value for value in curve.values):
                curves.append(curve)
        if curves:
            caption = "Recorded with each validation." if checked else ""
            title += _CHECKED if checked else ""
            yield _drawn(f"curve-{index}", title, curves, histories, caption, wide=name == "gradient_norm")
    if others[_MOST_OTHERS:]:
        yield element("p", f"Not drawn: {', '.join(others[_MOST_OTHERS:])}. They are in the metrics of the run.")


def _range(curves: Sequence[Curve]) -> str:
    ranges = []
    for curve in curves:
        values = [value for value in curve.values if value == value]
        if values:
            name = f"{curve.name}{', validation' if curve.dots else ''}"
            ends = f"from {values[0]:.4g} to {values[-1]:.4g}"
            ranges.append(f"{name}: {ends}, least {min(values):.4g}, largest {max(values):.4g}")
    return "; ".join(ranges)


#: Style sheet of a page. Tables and pictures that scroll sideways have shadows at the edges where there is more.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 1280px;
  padding: 0 16px 48px; }
h1 { font-size: 1.6rem; margin: 1.2rem 0 .4rem; overflow-wrap: break-word; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p, li, dd, figcaption { max-width: 75ch; overflow-wrap: break-word; }
.state { font-size: 1.1rem; padding: .5rem .8rem; border-left: 6px solid #666; background: #f4f4f4;
  overflow-wrap: break-word; }
.complete { border-color: #009e73; } .uneven { border-color: #d9a400; } .failed, .silent { border-color: #b00020; }
.stopped { border-color: #d55e00; } .running { border-color: #0072b2; }
figure { margin: 1rem 0; } figcaption { color: #444; font-size: .92rem; margin-top: .3rem; }
svg { display: block; width: 100%; height: auto; max-width: 760px; }
svg text { font-family: system-ui, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 0 32px; }
.wide { overflow-x: auto; margin: .8rem 0; background:
  linear-gradient(90deg, #fff 40%, #fff0) 0 0 / 48px 100% no-repeat local,
  linear-gradient(-90deg, #fff 40%, #fff0) 100% 0 / 48px 100% no-repeat local,
  linear-gradient(90deg, #0005, #0000) 0 0 / 16px 100% no-repeat scroll,
  linear-gradient(-90deg, #0005, #0000) 100% 0 / 16px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; } tbody th { font-weight: 500; }
td { font-variant-numeric: tabular-nums; min-width: 5ch; max-width: 75ch; }
thead th { vertical-align: bottom; }
th.n, td.n { text-align: right; min-width: 4ch; } td.n, th[scope=row] { white-space: nowrap; }
td.t { min-width: 24ch; }
tbody th[scope=row] { min-width: 4ch; }
.facts th[scope=row], .facts td { white-space: normal; min-width: 0; }
.title { font-weight: 600; margin: .8rem 0 0; } .title + .wide { margin-top: 0; }
dl { font-size: .92rem; margin: .4rem 0; } dt { font-weight: 600; } dd { margin: 0 0 .3rem 1.2rem; }
nav ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; }
.long svg { min-width: 640px; }
.pictures > * { min-width: 0; }
.key { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem;
  font-size: .92rem; }
.spot { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.replicas { display: flex; flex-wrap: wrap; gap: 12px 20px; margin: .6rem 0; }
.replica { border: 1px solid #bbb; border-collapse: separate; border-spacing: 6px; border-radius: 6px; }
.replica th, .replica td { border: 0; padding: 0 .2rem; white-space: nowrap; min-width: 0; font-size: .85rem; }
.ranks { display: flex; flex-wrap: wrap; gap: 6px; }
.rank { display: inline-block; border: 3px solid; border-radius: 4px; padding: .1rem .35rem; white-space: nowrap;
  font-size: .85rem; }
details { margin: 1rem 0; border: 1px solid #ccc; border-radius: 6px; padding: 0 1rem; }
summary { padding: .6rem 0; cursor: pointer; }
"""


def differences(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    """Yield a table of the settings, and one of the facts of the environment, that are not the same in all runs."""
    without = [history.name for history in histories if history.start is None]
    known = [history for history in histories if history.start is not None]
    if without:
        yield element("p", f"Without a record of its configuration: {', '.join(without)}.")
    if len(known) < 2:
        return
    head = ("", *(history.name for history in known))
    chosen = [settings(history.start) for history in known]
    yield from _comparable(chosen)
    sessions = " of the last sessions" if any(len(history.sessions) > 1 for history in known) else ""
    environments = [environment(history.start) for history in known if history.start]
    for what, values in ((f"settings{sessions}", chosen), ("facts of the environment", environments)):
        rows = sorted(_rows(values))
        different = [row for row in rows if len(set(row[1:])) > 1]
        same = len(rows) - len(different)
        if different:
            yield table(f"The {what} that differ; the other {same} are the same", head, different)
            if any("-" in row for row in different):
                yield element("p", '"-": the run has no such setting. "not set": it has, and leaves it unset.')
        else:
            yield element("p", f"All {same} {what} are the same.")
    if same_environment(histories):
        yield folded("Environment of all runs", table("Environment of all runs", (), environments[0].items()))


def _rows(values: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    names = dict.fromkeys(name for one in values for name in one)
    return [(name, *(one.get(name, "-") for one in values)) for name in names]


def _comparable(chosen: Sequence[dict[str, str]]) -> Iterator[Markup]:
    """Yield a warning if the settings of model or data differ between runs."""
    different = {row[0].split(".")[0] for row in _rows(chosen) if len(set(row[1:])) > 1}
    names = [f"[{name}]" for name in ("model", "data") if name in different]
    if names:
        yield element("p", f"The runs differ in {' and '.join(names)}: their losses may not be comparable.")


def same_environment(histories: Sequence[RunHistory]) -> bool:
    """Return whether all runs have recorded the same environment."""
    environments = [environment(history.start) if history.start else {} for history in histories]
    return bool(environments[0]) and all(one == environments[0] for one in environments)


_WORDS = {
    "1f1b": "a schedule of a pipeline: each stage alternates one forward and one backward pass as soon as it can",
    "agreement": "the phase in which ranks exchange samples, losses and norms, and agree on what is next",
    "chunk": "consecutive blocks of the model, which one stage of the pipeline computes",
    "counted": "of memory: added up where the library allocates it, while the run trains",
    "ddp": "every replica has all parameters, gradients and optimizer state",
    "global batch": "all samples of one step, over all ranks",
    "grain": "the smallest piece of the global batch that one rank computes; sums over grains have a fixed order",
    "group buffers": "memory for messages in the groups of ranks that share a layer (tensor and context groups)",
    "micro-batch": "the samples that go through the model or the pipeline at once",
    "planned": "of memory: what a plan computes before the first step, as mpizero plan does",
    "publication": "the phase in which updated parameters are sent to the ranks that need them",
    "replica": "ranks that hold one copy of the model together, and compute their part of the global batch",
    "skipped": "of a step: its gradient was not finite, so that nothing was updated",
    "stage": "the ranks that hold one section of the model's depth in a pipeline",
    "tensor part": "the part of every layer's parameters that one rank of a tensor group holds",
    "session": "one start or resume of a run",
    "zero1": "optimizer state is divided among replicas",
    "zero2": "optimizer state and gradients are divided among replicas",
    "zero3": "optimizer state, gradients and parameters are divided among replicas",
}


def glossary(page: str) -> Markup:
    """Return a section with the meanings of those words of the glossary that occur in ``page``."""
    words = [(word, f"{meaning}.") for word, meaning in _WORDS.items() if re.search(rf"\b{word}", page, re.IGNORECASE)]
    return section("Words", definitions(words), name="words") if words else Markup("")


#: Beginning of every file that this module writes; it may replace files that begin so.
HEADER = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="mpizero report">'
#: Name of the file that is written by default, in the folder of the first run.
DEFAULT = "report.html"


class ReportFileError(MpizeroError):
    """Report that the file for the HTML report cannot be written."""

    status = ExitStatus.INPUT_OUTPUT


def report(folders: Sequence[str], output: str | None, *, force: bool = False) -> Path:
    """Write the report of the runs in ``folders``, and return its path. Not collective.

    Parameters
    ----------
    folders : sequence of str
        Folders of runs.
    output : str or None
        Path of the file. None means ``report.html`` in the first folder.
    force : bool
        Whether to replace an existing file that is not a report.

    Raises
    ------
    DataError
        If a folder is not the folder of a run, or its records are damaged.
    ConfigError
        If ``output`` is a file that is not a report and ``force`` is False, or if a run is given twice.
    UnsupportedError
        If matplotlib is not installed.
    """
    path = home_path(folders[0]) / DEFAULT if output is None else home_path(output)
    now = time.time()
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ConfigError(f"{', '.join(folders)}: a run is given twice; give each once")
    histories = [RunHistory(name, read_run(folder), now) for name, folder in zip(_names(folders), folders, strict=True)]
    _check_replaceable(path, force)
    text = page(histories)
    try:
        write_atomic(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise ReportFileError(f"{path}: the report cannot be written: {error.strerror or error}") from None
    return path


def _names(folders: Sequence[str]) -> list[str]:
    """Return the last part of each folder's path; the whole paths if the last parts are not all different."""
    paths = [Path(os.path.abspath(home_path(folder))) for folder in folders]
    names = [path.name or str(path) for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _check_replaceable(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"-o {path}: is a folder; give the path of a file, such as {path / DEFAULT}")
    if path.exists() and not force:
        with path.open("rb") as file:
            known = file.read(len(HEADER)) == HEADER.encode()
        if not known:
            raise ConfigError(f"-o {path}: exists, and is no report of mpizero; give another path, or --force")


def page(histories: Sequence[RunHistory]) -> str:
    """Return the HTML page about ``histories``. Not collective."""
    title = f"Run {histories[0].name}" if len(histories) == 1 else f"{len(histories)} runs"
    body = joined(_one(histories[0]) if len(histories) == 1 else _several(histories))
    words = glossary(body.partition('<section id="configuration">')[0])
    body = joined([_contents(body + words), body, words])
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(histories[0].now))
    foot = element("p", f"Written by mpizero report, {written}. It shows what the run had recorded by then.")
    # Nothing may be loaded from anywhere, whatever a name or a message contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{STYLE}</style></head>"
    )
    return f"{HEADER}{head}<body><main>{element('h1', title)}{body}</main><footer>{foot}</footer></body></html>\n"


def _contents(body: str) -> Markup:
    """Return links to the sections of a page."""
    sections = re.findall(r'<section id="([^"]*)"><h2>(.*?)</h2>', body)
    links = (element("a", Markup(title), href=f"#{name}") for name, title in sections)
    return element("nav", listed(links), aria_label="Sections") if sections else Markup("")


def _one(history: RunHistory) -> Iterator[Markup]:
    yield _state(history)
    if history.start is not None:
        yield element("p", f"{'Last session: ' if len(history.sessions) > 1 else ''}{history.start.described}.")
    yield section("Findings", listed(findings(history)), name="findings")
    yield section("Summary", table("Figures of the run", (), _summary(history).items()), name="summary")
    yield curve_section([history])
    yield from run_sections(history)
    yield section("Configuration", configuration(history), name="configuration")


def _state(history: RunHistory) -> Markup:
    """Return a paragraph that says how the run ended; a complete run with skipped steps is marked."""
    uneven = " uneven" if history.state == "complete" and history.faults else ""
    return element("p", history.outcome, class_=f"state {history.state}{uneven}")


def _several(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    colours = key((colour_of(number), history.name) for number, history in enumerate(histories))
    head = ("", *(history.name for history in histories))
    summary = table("Figures of the runs", head, _rows([_summary(history) for history in histories]))
    yield section("Summary", colours, summary, name="summary")
    yield section("What differs", *differences(histories), name="what-differs")
    yield curve_section(histories, colours)
    for number, history in enumerate(histories):
        machine = not same_environment(histories)
        title = f"Layout, time, memory, checkpoints of {history.name}"
        details = folded(title, *run_sections(history, number, level=3, machine=machine))
        content = (_state(history), listed(findings(history)), details)
        yield section(f"Run {history.name}", *content, name=f"run-{number}")


def _summary(history: RunHistory) -> dict[str, str]:
    """Return the most important facts of a run by name; unknown facts are left out."""
    start, result = history.start, history.records.result or {}
    best = result.get("best")
    steps, checks = history.series("validation_loss")
    batch = None if start is None else start.layout.get("global_batch")
    return {
        name: value
        for name, value in {
            "state": history.state,
            "steps": f"{history.done:,}" + (f" of {history.planned:,}" if history.planned is not None else ""),
            "last loss": "" if history.loss is None else f"{history.loss:.6g}",
            "last validation loss": f"{checks[-1]:.6g} (step {steps[-1]:,})" if steps else "",
            "best": f"{best.get('metric')} {best.get('value')} after step {best.get('step')}"
            if isinstance(best, dict)
            else "",
            "skipped steps": f"{len(history.skips):,}",
            "resumes": f"{len(history.resumes)}" if history.sessions else "",
            "parameters": "" if start is None else f"{start.parameter_count:,}",
            "SHA-256 of the parameters": history.digest,
            "ranks": "" if start is None else f"{start.ranks:,}",
            "layout": "" if start is None else described_layout(start),
            "global batch": "" if batch is None else f"{batch:,} samples",
            "median speed": ""
            if history.speed is None
            else f"{speed_text(history.speed)} {history.rate.removesuffix('_per_second')}/s",
            "duration": _duration(history),
            "began": _date(history.sessions[0].events[0].time) if history.sessions else "",
            "last record": _date(history.written),
            "folder": os.path.abspath(history.records.folder),
        }.items()
        if value
    }


def _duration(history: RunHistory) -> str:
    """Return the duration of a run, and its parts for first steps and for checkpoints that interrupted the training."""
    if history.seconds is None:
        return ""
    several = len(history.sessions) > 1
    details = [f"{len(history.sessions)} sessions, without the pauses between"] if several else []
    begun = [
        session.memory.time - session.start.time for session in history.sessions if session.memory and session.start
    ]
    if begun:
        details.append(f"{duration(sum(begun))} of it until the first step{' of each' if several else ''} was done")
    writes = [event.seconds for session in history.sessions for event in session.checkpoints if not event.beside]
    if writes:
        details.append(f"{duration(sum(writes))} for {counted(len(writes), 'checkpoint')}")
    return duration(history.seconds) + (f" ({'; '.join(details)})" if details else "")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
