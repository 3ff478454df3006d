"""Compose the report of one or several runs, one file of HTML that needs nothing else, and write it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpizero._util.checks import home_path
from mpizero._util.text import duration
from mpizero.errors import ConfigError, ExitStatus, MpizeroError
from mpizero.train.events import read_run
from mpizero.train.report.findings import findings, speed_text
from mpizero.train.report.history import RunHistory, counted
from mpizero.train.report.layout_drawing import described_layout
from mpizero.train.report.markup import Markup, element, folded, joined, key, listed, section, table
from mpizero.train.report.sections.curve_sections import colour_of, curve_section
from mpizero.train.report.sections.differences import differences, same_environment
from mpizero.train.report.sections.glossary import glossary
from mpizero.train.report.sections.run_sections import configuration, run_sections
from mpizero.train.report.style import STYLE

#: What a file begins with that this module has written, and so may replace.
MARK = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="mpizero report">'
#: Name of the file that is written by default, in the folder of the first run.
DEFAULT = "report.html"


class ReportFileError(MpizeroError):
    """Report that the file of a report cannot be written."""

    status = ExitStatus.INPUT_OUTPUT


def report(folders: Sequence[str], output: str | None, *, force: bool = False) -> Path:
    """Write the report of the runs in ``folders``, and return its path. Not collective.

    Parameters
    ----------
    folders : sequence of str
        Folders of runs.
    output : str or None
        Path of the file. None is ``report.html`` in the first folder.
    force : bool
        Whether a file may be replaced that is no report.

    Raises
    ------
    DataError
        If a folder is no run's, or its records are damaged.
    ConfigError
        If ``output`` is a file that is no report and ``force`` is False, or if a run is given twice.
    UnsupportedError
        If matplotlib is not installed.
    """
    path = home_path(folders[0]) / DEFAULT if output is None else home_path(output)
    now = time.time()
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ConfigError(f"{', '.join(folders)}: a run is given twice; give each once")
    histories = [RunHistory(name, read_run(folder), now) for name, folder in zip(_names(folders), folders, strict=True)]
    _check_replaceable(path, force)
    _write(path, page(histories))
    return path


def _names(folders: Sequence[str]) -> list[str]:
    """Return the last part of each folder's path; whole paths where those are not different."""
    paths = [Path(os.path.abspath(home_path(folder))) for folder in folders]
    names = [path.name or str(path) for path in paths]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _check_replaceable(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"-o {path}: is a folder; give the path of a file, such as {path / DEFAULT}")
    if path.exists() and not force:
        with path.open("rb") as file:
            known = file.read(len(MARK)) == MARK.encode()
        if not known:
            raise ConfigError(f"-o {path}: exists, and is no report of mpizero; give another path, or --force")


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ReportFileError(f"{path}: the report cannot be written: {error.strerror or error}") from None


def page(histories: Sequence[RunHistory]) -> str:
    """Return the page about some runs. Not collective."""
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
    return f"{MARK}{head}<body><main>{element('h1', title)}{body}</main><footer>{foot}</footer></body></html>\n"


def _contents(body: str) -> Markup:
    """Return links to the sections of a page."""
    found = re.findall(r'<section id="([^"]*)"><h2>(.*?)</h2>', body)
    links = (element("a", Markup(title), href=f"#{name}") for name, title in found)
    return element("nav", listed(links), aria_label="Sections") if found else Markup("")


def _one(history: RunHistory) -> Iterator[Markup]:
    yield _state(history)
    if history.start is not None:
        yield element("p", f"{'Last visit: ' if len(history.visits) > 1 else ''}{history.start.described}.")
    yield section("Findings", listed(findings(history)), name="findings")
    yield section("Summary", table("Figures of the run", (), _summary(history).items()), name="summary")
    yield curve_section([history])
    yield from run_sections(history)
    yield section("Configuration", configuration(history), name="configuration")


def _state(history: RunHistory) -> Markup:
    """Return how a run ended; one that is complete is marked if steps were skipped on the way."""
    uneven = " uneven" if history.state == "complete" and history.faults else ""
    return element("p", history.told, class_=f"state {history.state}{uneven}")


def _several(histories: Sequence[RunHistory]) -> Iterator[Markup]:
    colours = key((colour_of(number), history.name) for number, history in enumerate(histories))
    summaries = [_summary(history) for history in histories]
    rows = [
        (name, *(summary.get(name, "-") for summary in summaries))
        for name in dict.fromkeys(name for summary in summaries for name in summary)
    ]
    head = ("", *(history.name for history in histories))
    yield section("Summary", colours, table("Figures of the runs", head, rows), name="summary")
    yield section("What differs", *differences(histories), name="what-differs")
    yield curve_section(histories, colours)
    for number, history in enumerate(histories):
        machine = not same_environment(histories)
        details = folded(
            f"Layout, time, memory, checkpoints of {history.name}",
            *run_sections(history, number, level=3, machine=machine),
        )
        content = (_state(history), listed(findings(history)), details)
        yield section(f"Run {history.name}", *content, name=f"run-{number}")


def _summary(history: RunHistory) -> dict[str, str]:
    """Return the most important facts of a run by name; what is not known is left out."""
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
            "resumes": f"{len(history.resumes)}" if history.visits else "",
            "parameters": "" if start is None else f"{start.parameter_count:,}",
            "SHA-256 of the parameters": history.digest,
            "ranks": "" if start is None else f"{start.ranks:,}",
            "layout": "" if start is None else described_layout(start),
            "global batch": "" if batch is None else f"{batch:,} samples",
            "median speed": ""
            if history.speed is None
            else f"{speed_text(history.speed)} {history.rate.removesuffix('_per_second')}/s",
            "duration": _duration(history),
            "began": _date(history.visits[0].events[0].time) if history.visits else "",
            "last record": _date(history.written),
            "folder": os.path.abspath(history.records.folder),
        }.items()
        if value
    }


def _duration(history: RunHistory) -> str:
    """Return how long a run took, and how much of it first steps and checkpoints did that nothing was beside."""
    if history.seconds is None:
        return ""
    several = len(history.visits) > 1
    told = [f"{len(history.visits)} visits, without the pauses between"] if several else []
    begun = [visit.memory.time - visit.start.time for visit in history.visits if visit.memory and visit.start]
    if begun:
        told.append(f"{duration(sum(begun))} of it until the first step{' of each' if several else ''} was done")
    writes = [event.seconds for visit in history.visits for event in visit.checkpoints if not event.beside]
    if writes:
        told.append(f"{duration(sum(writes))} for {counted(len(writes), 'checkpoint')}")
    return duration(history.seconds) + (f" ({'; '.join(told)})" if told else "")


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
