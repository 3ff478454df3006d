"""Follow a run in a terminal, from the files that it writes.

A running job appends lines to its files, and :class:`GrowingFile` reads the new lines each time that it is asked.
:func:`terminal_curve` draws a curve with characters: Braille dots, or stars if the terminal has only ASCII characters.
:func:`watch` shows what :class:`FollowedRun` has read so far, as a screen or as lines for a log.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from mpizero._util.checks import home_path
from mpizero._util.text import age, amount, duration, printable
from mpizero.errors import DataError, ExitStatus
from mpizero.tools.report.history import RunHistory, counted, described_resume, described_skip, speed_text
from mpizero.train.events import EVENTS, METRICS, RESULT, SUPERSEDED, RunRecords, SessionEvents, is_step


class GrowingFile:
    """Read the new lines of a growing file of JSON lines at each call of :meth:`look`.

    A file that is replaced or truncated, as after a resume, is read from its start again. The file is only read, by
    polling, so this works on network file systems, too.

    Parameters
    ----------
    path : Path
        The file; it need not exist yet.

    Attributes
    ----------
    lines : list of dict
        All lines read so far, without damaged lines.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._identity = path, 0, (0, 0)
        self._rest = b""
        self.lines: list[dict[str, Any]] = []

    def look(self) -> bool:
        """Read the new lines of the file; return whether there were any changes."""
        try:
            with self._path.open("rb") as file:
                status = self._path.stat()
                if (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset:
                    had = bool(self.lines)
                    self._identity, self._offset, self._rest = (status.st_dev, status.st_ino), 0, b""
                    self.lines = []
                else:
                    had = False
                file.seek(self._offset)
                more = file.read()
        except FileNotFoundError:
            had, more = bool(self.lines), b""
            self._offset, self._rest, self.lines = 0, b"", []
        self._offset += len(more)
        *complete, self._rest = (self._rest + more).split(b"\n")
        for line in complete:
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(values, dict):
                self.lines.append(values)
        return had or bool(complete)


#: Bits of the dots of a Braille character, by row and column.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def terminal_curve(
    steps: Sequence[float], values: Sequence[float], width: int, height: int, *, ascii_only: bool = False
) -> list[str]:
    """Return a curve as ``height`` lines of at most ``width`` characters, with its least and largest value at the left.

    Neighbouring points are joined; values that are not finite are left out. The list is empty if no value is finite, or
    if width or height are too small.
    """
    points = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    if not points or height < 3:
        return []
    low, high = min(value for _, value in points), max(value for _, value in points)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 2
    columns, rows = width - margin, height - 1
    if columns < 10:
        return []
    wide, tall = (1, 1) if ascii_only else (2, 4)
    cells = [[0] * columns for _ in range(rows)]
    for x, y in _joined_dots(points, columns * wide, rows * tall):
        cells[y // tall][x // wide] |= 1 if ascii_only else _DOTS[y % tall][x % wide]
    bar, corner, line = ("|", "+", "-") if ascii_only else ("│", "└", "─")
    lines = []
    for number, row in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == rows - 1 else ""
        drawn = "".join(" " if not dots else "*" if ascii_only else chr(0x2800 + dots) for dots in row)
        lines.append(f"{label.rjust(margin - 2)} {bar}{drawn}".rstrip())
    foot = f" step {points[0][0]:,.0f} to {points[-1][0]:,.0f} "
    return [*lines, f"{' ' * (margin - 1)}{corner}{foot.center(columns, line)}"[:width]]


def _joined_dots(points: Sequence[tuple[float, float]], width: int, height: int) -> Iterator[tuple[int, int]]:
    """Yield column and row of each dot of a curve, for its points and for the lines that join them."""
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    before: tuple[int, float] | None = None
    for step, value in points:
        x = round((step - first) / (last - first or 1) * (width - 1))
        y = (high - value) / (high - low or 1) * (height - 1)
        x_before, y_before = before or (x, y)
        above = round(y_before)
        for column in range(min(x_before + 1, x), x + 1):
            row = round(y + (y_before - y) * (x - column) / (x - x_before or 1))
            yield from ((column, dot) for dot in range(min(row, above + 1), max(row + 1, above)))
            above = row
        before = x, y


#: Columns and lines of a terminal of unknown size, and the least numbers that are used.
_SIZE, _LEAST = (80, 24), (40, 12)
#: Terminal codes: to the top left corner, clear to the end of the line, and of the screen.
_HOME, _LINE_END, _SCREEN_END = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(folder: str, *, once: bool, interval: float, stream: TextIO | None = None) -> int:
    """Show a run until it has ended, or until Ctrl-C; return the exit status. Not collective.

    Parameters
    ----------
    folder : str
        The run's folder, which may still be empty.
    once : bool
        Whether to show the current state of the run once, and return.
    interval : float
        Seconds between two reads of the run's files.
    stream : TextIO, optional
        Stream on which the run is shown (default: standard output). If it is not a terminal, a line without control
        characters is written whenever there are new records.

    Raises
    ------
    DataError
        If there is no such folder; with ``once`` also if the folder has no records of a run.
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
    """Hold the records that a run has written so far into its folder ``folder``.

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
        """Read the records written since the last call; return whether there are any."""
        return any([file.look() for file in self._files])

    @property
    def history(self) -> RunHistory | None:
        """The history of the run so far; None if nothing is recorded."""
        metrics, events, result, superseded = (file.lines for file in self._files)
        metrics, superseded = ([one for one in lines if is_step(one.get("step"))] for lines in (metrics, superseded))
        if not (metrics or events):
            return None
        session_events = SessionEvents()
        for line in events:
            with suppress(ValueError):  # a damaged line: later lines are still used
                session_events.add(line)
        records = RunRecords(
            self.folder, tuple(metrics), tuple(superseded), session_events.sessions, result[-1] if result else None
        )
        return RunHistory(self.folder.resolve().name, records, time.time())


def _follow(followed: FollowedRun, out: TextIO, interval: float) -> None:
    terminal, printed = out.isatty(), False
    if terminal:
        out.write(f"{_HOME}{_SCREEN_END}")
    while True:
        new = followed.look()
        history = followed.history
        if terminal:  # redrawn without new records, too, because ages of records change
            lines = screen(followed, *_size(out), ascii_only=not _has_braille(out))
            out.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _SCREEN_END)
            out.flush()
        elif new or not printed:
            _print(out, [_line(history, followed.folder)])
        printed = True
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
    return printable("  ".join([history.outcome, *_last_metrics(history)]))


def _waiting(folder: Path) -> str:
    return printable(f"no run has recorded anything in {folder} yet; waiting for one (Ctrl-C ends this)")


def screen(followed: FollowedRun, width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """Return lines of text that show a run on a terminal of this size. Not collective."""
    history = followed.history
    if history is None:
        return _wrapped([_waiting(followed.folder)], width - 1, ascii_only=ascii_only)
    top = [f"{history.name}: {history.outcome}", _bar(history, width - 1)]
    if history.start is not None:
        top.insert(1, history.start.described)
    below = ["  ".join(_last_metrics(history)), *_events(history)]
    above, under = (_wrapped(lines, width - 1, ascii_only=ascii_only) for lines in (top, below))
    room = height - 2 - len(above) - len(under)
    curve = terminal_curve(*history.series("loss"), width - 1, min(room, 20), ascii_only=ascii_only)
    return [*above, *(["loss", *curve] if curve else []), *under][: height - 1]


def _wrapped(lines: list[str], width: int, *, ascii_only: bool) -> list[str]:
    """Wrap each line into at most two lines of ``width`` characters."""
    result = []
    for line in lines:
        text = printable(line)
        if ascii_only:
            text = text.encode("ascii", "replace").decode("ascii")
        result += textwrap.wrap(text, width, max_lines=2, placeholder=" ...")
    return result


def _bar(history: RunHistory, width: int) -> str:
    """Return the progress of a run as a bar, with the time left at the mean speed since the last session's start."""
    if not history.planned:
        return ""
    fraction = min(1.0, history.done / history.planned)
    text = f" {100 * fraction:.0f} %"
    start, done = history.start, history.done
    if history.state == "running" and start is not None and done > start.step and history.written > start.time:
        left = (history.planned - done) * (history.written - start.time) / (done - start.step)
        text += f", {duration(left)} left"
    room = max(10, min(40, width - len(text) - 2))
    full = round(fraction * room)
    return f"[{'#' * full}{'.' * (room - full)}]{text}"


def _last_metrics(history: RunHistory) -> list[str]:
    """Return the last values of the most important metrics of a run, with their names."""
    result = []
    for name, title in (("loss", "loss"), ("learning_rate", "lr"), ("gradient_norm", "gradient")):
        _, values = history.series(name)
        if values and (name == "loss" or math.isfinite(values[-1])):
            result.append(f"{title} {values[-1]:.4g}")
    if history.rate and (rates := history.series(history.rate)[1]):
        result.append(f"{speed_text(rates[-1])} {history.rate.removesuffix('_per_second')}/s")
    steps, values = history.series("validation_loss")
    if steps:
        result.insert(1, f"validation {values[-1]:.4g} (step {steps[-1]:,})")
    return result


def _events(history: RunHistory) -> list[str]:
    """Return lines about skipped steps, resumes and the last checkpoint."""
    result = []
    if history.skips:
        result.append(f"{counted(len(history.skips), 'step')} skipped. {described_skip(history.skips[-1])}")
    if history.resumes:
        result.append(described_resume(history.resumes[-1]))
    written = [event for session in history.sessions for event in session.checkpoints]
    if written:
        last = written[-1]
        result.append(f"checkpoint: step {last.step:,}, {amount(last.bytes)}B, {age(history.now - last.time)}")
    return result
