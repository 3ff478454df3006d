"""Compose the report of one or several runs, one file of HTML that needs nothing else, and write it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from mpizero.errors import ConfigError, ExitStatus, MpizeroError
from mpizero.train.number_format import duration
from mpizero.train.record.reader import read_run
from mpizero.train.report.curve_sections import colour_of, curve_section
from mpizero.train.report.findings import findings, speed_text
from mpizero.train.report.layout_drawing import described_layout
from mpizero.train.report.markup import Markup, element, joined, key, listed, section, table
from mpizero.train.report.run_sections import environment, run_sections, settings
from mpizero.train.report.story import RunStory

#: What a file begins with that this module has written, and so may replace.
MARK = '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="generator" content="mpizero report">'
#: Name of the file that is written by default, in the folder of the first run.
DEFAULT = "report.html"

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto; max-width: 1280px;
  padding: 0 16px 48px; }
h1 { font-size: 1.6rem; margin: 1.2rem 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid #ccc; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .4rem; }
p, li, figcaption { max-width: 75ch; overflow-wrap: anywhere; }
.state { font-size: 1.1rem; padding: .5rem .8rem; border-left: 6px solid #666; background: #f4f4f4;
  overflow-wrap: anywhere; }
.complete { border-color: #009e73; } .failed, .silent { border-color: #b00020; }
.stopped { border-color: #d55e00; } .running { border-color: #0072b2; }
figure { margin: 1rem 0; } figcaption { color: #444; font-size: .92rem; margin-top: .3rem; }
svg { display: block; width: 100%; height: auto; max-width: 760px; }
svg text { font-family: system-ui, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 500px), 1fr)); gap: 0 32px; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .92rem; }
caption { text-align: left; font-weight: 600; padding: .2rem 0; }
.wide caption { position: sticky; left: 0; max-width: calc(100vw - 48px); }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid #e4e4e4; }
th { font-weight: 600; } tbody th { font-weight: 500; }
td { font-variant-numeric: tabular-nums; overflow-wrap: anywhere; min-width: 5ch; max-width: min(75ch, 70vw); }
.pictures td, th[scope=row] { white-space: nowrap; max-width: none; }
.pictures td:last-child { white-space: normal; }
.long svg { min-width: 640px; }
.pictures > * { min-width: 0; }
.key { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem;
  font-size: .92rem; }
.spot { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.replicas { display: flex; flex-wrap: wrap; gap: 12px 20px; margin: .6rem 0; overflow-x: auto; }
.replica { border: 1px solid #bbb; border-collapse: separate; border-spacing: 6px; border-radius: 6px; }
.replica th, .replica td { border: 0; padding: 0 .2rem; white-space: nowrap; min-width: 0; font-size: .85rem; }
.ranks { display: flex; flex-wrap: wrap; gap: 6px; }
.rank { display: inline-block; border: 3px solid; border-radius: 4px; padding: .1rem .35rem; white-space: nowrap;
  font-size: .85rem; }
details { margin: 1rem 0; border: 1px solid #ccc; border-radius: 6px; padding: 0 1rem; }
summary { padding: .6rem 0; cursor: pointer; }
"""


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
    path = Path(output).expanduser() if output is not None else Path(folders[0]).expanduser() / DEFAULT
    now = time.time()
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise ConfigError(f"{', '.join(folders)}: a run is given twice; give each once")
    stories = [RunStory(name, read_run(folder), now) for name, folder in zip(_names(folders), folders, strict=True)]
    _check_replaceable(path, force)
    _write(path, page(stories))
    return path


def _names(folders: Sequence[str]) -> list[str]:
    """Return the last part of each folder's path; whole paths where those are not different."""
    paths = [Path(os.path.abspath(Path(folder).expanduser())) for folder in folders]
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


def page(stories: Sequence[RunStory]) -> str:
    """Return the page about some runs. Not collective."""
    title = f"Run {stories[0].name}" if len(stories) == 1 else f"{len(stories)} runs"
    body = _one(stories[0]) if len(stories) == 1 else _several(stories)
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(stories[0].now))
    foot = element("p", f"Written by mpizero report, {written}. It shows what the run had recorded by then.")
    # Nothing may be loaded from anywhere, whatever a name or a message contains.
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"{element('title', title)}<style>{_STYLE}</style></head>"
    )
    return f"{MARK}{head}<body><main>{element('h1', title)}{joined(body)}</main><footer>{foot}</footer></body></html>\n"


def _one(story: RunStory) -> Iterator[Markup]:
    yield element("p", story.told, class_=f"state {story.state}")
    if story.start is not None:
        yield element("p", f"{story.start.described}.")
    yield section("Findings", listed(findings(story)))
    yield section("Summary", table("Figures of the run", (), _summary(story).items()))
    yield curve_section([story])
    yield from run_sections(story)
    if chosen := settings(story.start):
        yield section(
            "Configuration", table("Settings of the last visit", ("setting", "value"), sorted(chosen.items()))
        )


def _several(stories: Sequence[RunStory]) -> Iterator[Markup]:
    colours = key((colour_of(number), story.name) for number, story in enumerate(stories))
    summaries = [_summary(story) for story in stories]
    rows = [
        (name, *(summary.get(name, "-") for summary in summaries))
        for name in dict.fromkeys(name for summary in summaries for name in summary)
    ]
    head = ("", *(story.name for story in stories))
    yield section("Summary", colours, table("Figures of the runs", head, rows))
    yield section("What differs", *_differences(stories))
    yield curve_section(stories, colours)
    for number, story in enumerate(stories):
        yield section(
            f"Run {story.name}", element("p", story.told, class_=f"state {story.state}"), listed(findings(story))
        )
        details = element("summary", f"Layout, time, memory, checkpoints of {story.name}")
        yield element("details", details, *run_sections(story, number, level=3))


def _summary(story: RunStory) -> dict[str, str]:
    """Return the most important facts of a run by name; what is not known is left out."""
    start, result = story.start, story.records.result or {}
    seconds = story.seconds
    speed = next((result[name] for name in ("tokens_per_second", "samples_per_second") if result.get(name)), None)
    best = result.get("best")
    return {
        name: value
        for name, value in {
            "state": story.state,
            "steps": f"{story.done:,}" + (f" of {story.planned:,}" if story.planned is not None else ""),
            "last loss": "" if story.loss is None else f"{story.loss:.6g}",
            "best": f"{best.get('metric')} {best.get('value')} after step {best.get('step')}"
            if isinstance(best, dict)
            else "",
            "skipped steps": f"{len(story.skips):,}",
            "resumes": f"{len(story.resumes)}" if story.visits else "",
            "parameters": "" if start is None else f"{start.parameter_count:,}",
            "SHA-256 of the parameters": story.digest,
            "layout": "" if start is None else described_layout(start),
            "median speed": "" if speed is None else f"{speed_text(speed)} {story.rate.removesuffix('_per_second')}/s",
            "duration": "" if seconds is None else duration(seconds),
            "began": _date(story.visits[0].events[0].time) if story.visits else "",
            "last line": _date(story.written),
            "folder": os.path.abspath(story.records.folder),
        }.items()
        if value
    }


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def _differences(stories: Sequence[RunStory]) -> Iterator[Markup]:
    """Yield the settings and the environment in which some runs differ."""
    without = [story.name for story in stories if story.start is None]
    known = [story for story in stories if story.start is not None]
    if without:
        yield element("p", f"Without a record of its configuration: {', '.join(without)}.")
    if len(known) < 2:
        return
    head = ("", *(story.name for story in known))
    for what, values in (
        ("settings", [settings(story.start) for story in known]),
        ("facts of the environment", [environment(story.start) for story in known if story.start]),
    ):
        names = sorted({name for one in values for name in one})
        rows = [(name, *(one.get(name, "-") for one in values)) for name in names]
        different = [row for row in rows if len(set(row[1:])) > 1]
        same = len(rows) - len(different)
        if different:
            yield table(f"The {what} that differ; the other {same} are the same", head, different)
        else:
            yield element("p", f"All {same} {what} are the same.")
