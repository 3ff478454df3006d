"""Run parts, each in processes of its own with a limit of its own, and collect what they find."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from harness.jobs import ROOT, Job

from gpu_checking.__main__ import NO_MEMORY, SKIPPED
from gpu_checking.parts import Part

#: Verdicts of parts that need no repetition.
GOOD = ("ok", "skipped")
#: Seconds between the question where a part hangs, and its end.
_GRACE = 0.5


class Results:
    """Hold the rows of the parts that have run, in a file that is whole after each of them.

    Rows that are in the file are kept until their parts run again; ``facts`` are written beside them.
    """

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        self._path, self._facts = path, facts
        self.rows: list[dict[str, Any]] = read(path)["parts"] if path.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        """Write the row of a part, in place of an earlier one."""
        self.rows = [old for old in self.rows if old["part"] != row["part"]] + [row]
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._facts | {"parts": self.rows}, indent=1) + "\n", encoding="utf-8")
        new.replace(self._path)

    def wrong(self) -> list[str]:
        """Return the names of the parts that must run again."""
        return [row["part"] for row in self.rows if row["verdict"] not in GOOD]


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a file of results; end the script if it is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["parts"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: no results of this script ({type(error).__name__}: {error})")
    return found


def run_part(part: Part, limit: float, small: bool, folder: Path, log: TextIO, absent: str) -> dict[str, Any]:
    """Run a part for at most ``limit`` seconds; return its row of the results.

    With ``small`` it uses small sizes, for the simulator. Findings go to ``folder``, what is printed to ``log``;
    ``absent`` says why there is no GPU, or "".
    """
    row: dict[str, Any] = {"part": part.name, "seconds": 0.0, "limit": round(limit, 1), "findings": []}
    if part.gpu and absent:
        return row | {"verdict": "skipped", "figure": absent}
    if limit <= 0:
        return row | {"verdict": "no time", "figure": "--budget was used up by the parts before"}
    findings = folder / f"{part.name}.jsonl"
    findings.unlink(missing_ok=True)
    print(f"\n==== {part.name}: {part.shows}", file=log, flush=True)
    begun = time.monotonic()
    status = _status([part.function, str(findings), *(["--small"] if small else [])], limit, log)
    row["seconds"] = round(time.monotonic() - begun, 1)
    if findings.exists():
        row["findings"] = [json.loads(line) for line in findings.read_text(encoding="utf-8").splitlines()]
    return row | dict(zip(("verdict", "figure"), judged(status, row["findings"], limit), strict=True))


def _status(arguments: Sequence[str], limit: float, log: TextIO) -> int | None:
    """Run ``gpu_checking`` as a process; return its exit status, or None if it was ended after ``limit`` seconds."""
    job = Job([sys.executable, "-m", "gpu_checking", *arguments], log, log, cwd=ROOT, threads=None)
    try:
        if job.wait(limit):
            return job.process.returncode
        job.process.send_signal(signal.SIGUSR2)  # its threads' stacks come to the log
        time.sleep(_GRACE)
        return None
    finally:
        job.end()


def command_line(small: bool) -> list[str]:
    """Return how to run the command line of mpizero; if ``small``, on simulated GPUs."""
    return [sys.executable, "-m", "tests.support.simulated" if small else "mpizero"]


def judged(status: int | None, findings: Sequence[dict[str, Any]], limit: float) -> tuple[str, str]:
    """Return the verdict on a part, and its figure in a line.

    ``status`` is the exit status of its process, None if that was ended after ``limit`` seconds.
    """
    last = f"{findings[-1]['name']}: {findings[-1]['figure']}" if findings else "it found nothing before"
    if status is None:
        return "hung", f"ended after its {limit:.0f} s; last: {last}"
    if status < 0:
        return "crashed", f"by {signal.Signals(-status).name}; last: {last}"
    said = {finding["name"]: finding["figure"] for finding in findings}
    if status == SKIPPED:
        return "skipped", said.get("skipped", last)
    if status == NO_MEMORY:
        return "no memory", said.get("error", last)
    wrong = [f"{finding['name']}: {finding['figure']}" for finding in findings if finding["ok"] is False]
    if status:
        return "error", said.get("error", f"exit status {status}; last: {last}")
    if wrong:
        return "WRONG", wrong[0] + (f" (and {len(wrong) - 1} more)" if wrong[1:] else "")
    checks = sum(finding["ok"] is not None for finding in findings)
    return "ok", said.get("in short") or (f"{checks} checks" if checks else last)


def table(rows: Sequence[dict[str, Any]], order: Sequence[str]) -> str:
    """Return the table of the parts: part, seconds, verdict, figure."""
    rows = sorted(rows, key=lambda row: order.index(row["part"]))
    lines = [f"{'part':10} {'seconds':>7}  {'verdict':9}  figure"]
    lines += [f"{row['part']:10} {row['seconds']:7.1f}  {row['verdict']:9}  {row['figure']}" for row in rows]
    return "\n".join([*lines, f"{'total':10} {sum(row['seconds'] for row in rows):7.1f}"])
