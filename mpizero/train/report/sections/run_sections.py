"""Compose what a report tells about one run beside its curves, a section for each kind of record."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from mpizero.train.events import VisitRecords, VisitStart
from mpizero.train.report.findings import described_resume, reason
from mpizero.train.report.history import RunHistory, counted, flattened
from mpizero.train.report.layout_drawing import described_layout, draw_layout
from mpizero.train.report.markup import Markup, element, figure, folded, listed, long_table, section, table
from mpizero.train.report.sections.columns import bytes_column, seconds_column
from mpizero.train.report.sections.memory_section import memory
from mpizero.train.report.sections.time_sections import phases, pipeline

#: How records say that results are exact.
_BITS = "the bits of one process"
#: Resumes that are described one by one.
_MOST_RESUMES = 24
#: What records call the facts of an environment, and what a reader does.
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
        What tells runs of one page apart.
    level : int
        Level of the headings.
    machine : bool
        Whether there is a section about the environment.
    """
    contents = [
        ("Skipped steps", _skips(history)),
        ("Visits and resumes", _visits(history)),
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
    rows, kept = [], 0
    for skip in history.skips:
        dump = f"bad_steps/step_{skip.step:08d}"
        is_kept = (history.records.folder / dump).is_dir()
        kept += is_kept
        rows.append(
            (f"{skip.step:,}", reason(skip), f"mpizero replay {history.name}/{dump}" if is_kept else "not kept")
        )
    told = [f"The samples of {counted(kept, 'step')} are kept"]
    told[0] += "; a run keeps those of its first bad steps only." if 0 < kept < len(rows) else "."
    if kept:
        above = history.records.folder.resolve().parent
        told.append(f"The commands look at them, and are to be run in {above}.")
    found = [{int(one.get("rank", -1)) for one in skip.event.found} for skip in history.skips if skip.event]
    ranks = Counter(rank for one in found for rank in one)
    if len(ranks) > 1:
        each = ", ".join(f"{count:,} on rank {rank}" for rank, count in sorted(ranks.items()))
        told.append(f"Steps by rank that found a value: {each}.")
    yield element("p", " ".join(told))
    yield long_table(
        "Skipped steps, which left parameters and optimizer state as they were",
        ("step", "why; samples of the global batch", "command to inspect"),
        rows,
    )


def _visits(history: RunHistory) -> Iterator[Markup]:
    if len(history.visits) < 2:
        return
    rows = []
    for visit in history.visits:
        start, end = visit.start, visit.end
        if start is not None:
            how = {"done": "complete"}.get(end.reason, end.reason) if end else "no end recorded: killed, probably"
            if visit is history.last and end is None and history.state == "running":
                how = "running"
            why = f": {end.message}" if end and end.message else ""
            until = "?" if (step := history.last_step(visit)) is None else f"{step:,}"
            rows.append((str(visit.number), f"{start.step + 1:,}", until, described_layout(start), f"{how}{why}"))
    yield long_table("A visit is one start or resume", ("visit", "first step", "last step", "layout", "end"), rows)
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
    """Return what results are equal to, in a sentence."""
    if text.startswith(_BITS):
        return f"Results are bit for bit those of a single process{text.removeprefix(_BITS)}."
    return f"Results are those of a single process {text}."


def _blocks(blocks: Any) -> str:
    names = [str(name) for name in blocks] if isinstance(blocks, list) else []
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} ({len(names)} blocks)"


def _checkpoints(history: RunHistory) -> Iterator[Markup]:
    written = [event for visit in history.visits for event in visit.checkpoints]
    if not history.visits:
        return
    if not written:
        yield element("p", "No checkpoint was written.")
        return
    unit, sizes = bytes_column([one.bytes for one in written])
    time_unit, times = seconds_column([one.seconds for one in written])
    best, own_paths = any(one.best for one in written), any(one.path != _path(one.step) for one in written)
    beside = any(one.beside for one in written)
    rows = [
        (
            f"{one.step:,}",
            *([one.path] if own_paths else []),
            size,
            taken,
            *(["yes" if one.beside else "no"] if beside else []),
            *(["yes" if one.best else "no"] if best else []),
            "kept" if (history.records.folder / one.path).is_dir() else "removed since",
        )
        for one, size, taken in zip(written, sizes, times, strict=True)
    ]
    head = ["step", *(["path"] if own_paths else []), f"size, {unit}", f"written in, {time_unit}"]
    head += [*(["beside the training"] if beside else []), *(["best so far"] if best else []), "now"]
    where = "" if own_paths else f", such as {written[-1].path}"
    yield long_table(f"Checkpoints that were written{where}", head, rows, ends=3)


def _path(step: int) -> str:
    return f"checkpoints/step_{step:08d}"


def _environment(history: RunHistory) -> Iterator[Markup]:
    if (start := history.start) is None:
        yield element(
            "p", "Environment, layout, memory and phases are not recorded: a version without events has run it."
        )
        return
    yield table(f"Environment{of_last_visit(history)}", (), environment(start).items())


def of_last_visit(history: RunHistory) -> str:
    """Return " of the last visit" if a run had several."""
    return " of the last visit" if len(history.visits) > 1 else ""


def environment(start: VisitStart) -> dict[str, str]:
    """Return versions, hosts and the machine of a visit by name."""
    hosts = ", ".join(map(str, start.hosts[:8])) + (f" and {len(start.hosts) - 8} more" if len(start.hosts) > 8 else "")
    found = {"hosts": hosts} | {name: str(value) for name, value in start.machine.items() if value not in ("", None)}
    found |= {name: str(value) for name, value in start.versions.items()}
    if "blas" in found:
        found["blas"] = re.sub(r" for (\w+)$", r" (kernel \1)", found["blas"])
    return {_FACTS.get(name, name): value for name, value in found.items()}


def configuration(history: RunHistory) -> Markup:
    """Return all settings of a run, folded."""
    chosen = settings(history.start)
    title = f"{len(chosen)} settings{of_last_visit(history)}"
    return folded(title, table(title, ("setting", "value"), sorted(chosen.items()))) if chosen else Markup("")


def settings(visit: VisitRecords | VisitStart | None) -> dict[str, str]:
    """Return all settings of a configuration by name, as text; empty without a record."""
    start = visit.start if isinstance(visit, VisitRecords) else visit
    return {} if start is None else {name: shown(value) for name, value in flattened(start.config).items()}


def shown(value: Any) -> str:
    """Return a setting as text, as TOML writes it."""
    return "not set" if value is None else json.dumps(value, ensure_ascii=False)
