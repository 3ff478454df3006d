"""Follow a run in a terminal, from the files that it writes."""

from __future__ import annotations

import math
import shutil
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mpizero._util.checks import home_path
from mpizero._util.text import age, amount, duration, printable
from mpizero.errors import DataError, ExitStatus
from mpizero.train.events import EVENTS, METRICS, RESULT, SUPERSEDED, RunRecords, VisitEvents, is_step
from mpizero.train.report.findings import described_resume, described_skip, speed_text
from mpizero.train.report.growing_file import GrowingFile
from mpizero.train.report.history import RunHistory
from mpizero.train.report.terminal_curve import terminal_curve

#: Lines and columns that a terminal has if it does not tell, and the least that are used.
_SIZE, _LEAST = (80, 24), (40, 12)
#: Terminal codes: to the top left corner, clear to the end of the line, and of the screen.
_HOME, _LINE_END, _SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(folder: str, *, once: bool, interval: float, stream: TextIO | None = None) -> int:
    """Show a run until it has ended, or until Ctrl-C; return the exit status. Not collective.

    Parameters
    ----------
    folder : str
        The run's folder, in which there may be nothing yet.
    once : bool
        Whether to show the run as it is now, and return.
    interval : float
        Seconds between two looks.
    stream : TextIO, optional
        Where the run is shown (default: standard output). If it is no terminal, a line is written whenever something
        is new, without control characters.

    Raises
    ------
    DataError
        If there is no such folder; with ``once`` also if no run has recorded anything in it.
    """
    out = sys.stdout if stream is None else stream
    followed = FollowedRun(home_path(folder))
    try:
        if once:
            followed.look()
            if followed.history is None:
                raise DataError(
                    printable(f"{folder}: no run has recorded anything here; without --once, watch waits for one")
                )
            _print(out, screen(followed, *_size(out), ascii_only=not _has_braille(out)))
        else:
            _follow(followed, out, interval)
    except KeyboardInterrupt:
        out.write("\n")
    return int(ExitStatus.OK)


class FollowedRun:
    """Hold what a run has recorded so far. ``folder`` is the run's folder.

    Raises
    ------
    DataError
        If there is no such folder.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}; give the folder of a run: "
                'checkpoint.folder = "run/checkpoints" makes it "run"'
            )
        self.folder = folder
        self._files = [GrowingFile(folder / name) for name in (METRICS, EVENTS, RESULT, SUPERSEDED)]

    def look(self) -> bool:
        """Read what the run has recorded since the last look; return whether there is anything new."""
        return any([file.look() for file in self._files])

    @property
    def history(self) -> RunHistory | None:
        """The run so far; None if nothing is recorded."""
        metrics, events, result, superseded = (file.lines for file in self._files)
        metrics, superseded = ([one for one in lines if is_step(one.get("step"))] for lines in (metrics, superseded))
        if not (metrics or events):
            return None
        seen = VisitEvents()
        for line in events:
            with suppress(ValueError):  # damaged: what follows is still of use
                seen.add(line)
        records = RunRecords(
            self.folder, tuple(metrics), tuple(superseded), seen.visits, result[-1] if result else None
        )
        return RunHistory(self.folder.resolve().name, records, time.time())


def _follow(followed: FollowedRun, out: TextIO, interval: float) -> None:
    terminal, shown = out.isatty(), False
    if terminal:
        out.write(f"{_HOME}{_SCREEN_END}")
    while True:
        new = followed.look()
        history = followed.history
        if terminal:  # again and again: times go on
            lines = screen(followed, *_size(out), ascii_only=not _has_braille(out))
            out.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _SCREEN_END)
            out.flush()
        elif new or not shown:
            _print(out, [_line(history, followed.folder)])
        shown = True
        if history is not None and history.state in ("complete", "stopped", "failed"):
            return
        time.sleep(interval)


def _print(out: TextIO, lines: list[str]) -> None:
    out.write("".join(f"{line}\n" for line in lines))
    out.flush()


def _size(out: TextIO) -> tuple[int, int]:
    width, height = shutil.get_terminal_size(_SIZE) if out.isatty() else _SIZE
    return max(width, _LEAST[0]), max(height, _LEAST[1])


def _has_braille(out: TextIO) -> bool:
    return (out.encoding or "").lower().replace("-", "") == "utf8"


def _line(history: RunHistory | None, folder: Path) -> str:
    """Return the state of a run as one line for a log."""
    if history is None:
        return _waiting(folder)
    return printable("  ".join([history.told, *_figures(history)]))


def _waiting(folder: Path) -> str:
    return printable(f"no run has recorded anything in {folder} yet; waiting for one (Ctrl-C ends this)")


def screen(followed: FollowedRun, width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Return a run as lines that fit a terminal of this size. Not collective."""
    history = followed.history
    if history is None:
        return _wrapped([_waiting(followed.folder)], width - 1, ascii_only=ascii_only)
    top = [f"{history.name}: {history.told}", _bar(history, width - 1)]
    if history.start is not None:
        top.insert(1, history.start.described)
    below = ["  ".join(_figures(history)), *_events(history)]
    above, under = (_wrapped(lines, width - 1, ascii_only=ascii_only) for lines in (top, below))
    room = height - 2 - len(above) - len(under)
    curve = terminal_curve(*history.series("loss"), width - 1, min(room, 20), ascii_only=ascii_only)
    return [*above, *(["loss", *curve] if curve else []), *under][: height - 1]


def _wrapped(lines: list[str], width: int, *, ascii_only: bool) -> list[str]:
    """Return each line as at most two that fit."""
    found = []
    for line in lines:
        text = printable(line)
        if ascii_only:
            text = text.encode("ascii", "replace").decode("ascii")
        found += textwrap.wrap(text, width, max_lines=2, placeholder=" ...")
    return found


def _bar(history: RunHistory, width: int) -> str:
    """Return the progress of a run as a bar, with the seconds that are left if it goes on like this."""
    if not history.planned:
        return ""
    share = min(1.0, history.done / history.planned)
    text = f" {100 * share:.0f} %"
    start, done = history.start, history.done
    if history.state == "running" and start is not None and done > start.step and history.written > start.time:
        left = (history.planned - done) * (history.written - start.time) / (done - start.step)
        text += f", {duration(left)} left"
    room = max(10, min(40, width - len(text) - 2))
    full = round(share * room)
    return f"[{'#' * full}{'.' * (room - full)}]{text}"


def _figures(history: RunHistory) -> list[str]:
    """Return the last figures of a run, each with its name."""
    found = []
    for name, title in (("loss", "loss"), ("learning_rate", "lr"), ("gradient_norm", "gradient")):
        _, values = history.series(name)
        if values and (name == "loss" or math.isfinite(values[-1])):
            found.append(f"{title} {values[-1]:.4g}")
    if history.rate and (rates := history.series(history.rate)[1]):
        found.append(f"{speed_text(rates[-1])} {history.rate.removesuffix('_per_second')}/s")
    steps, values = history.series("validation_loss")
    if steps:
        found.insert(1, f"validation {values[-1]:.4g} (step {steps[-1]:,})")
    return found


def _events(history: RunHistory) -> list[str]:
    """Return what has happened: skipped steps, resumes, the last checkpoint."""
    found = []
    if history.skips:
        count = len(history.skips)
        found.append(f"{count:,} step{'' if count == 1 else 's'} skipped. {described_skip(history.skips[-1])}")
    if history.resumes:
        found.append(described_resume(history.resumes[-1]))
    written = [event for visit in history.visits for event in visit.checkpoints]
    if written:
        last = written[-1]
        found.append(f"checkpoint: step {last.step:,}, {amount(last.bytes)}B, {age(history.now - last.time)}")
    return found
