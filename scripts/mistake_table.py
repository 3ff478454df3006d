"""Run one job for each of many typical mistakes of users, and print message, seconds and exit status of each.

    python scripts/mistake_table.py [--ranks 1 2 4] [--only batches ...] [--launcher "mpiexec python" ...] [--page]

The mistakes are the functions in scripts/mistakes/*.py, which declare the expected exit status and message. The exit
status of this script is 1 if a job hangs, ends with another status, or does not print the message. ``--page`` writes
the table into docs/failures.md. The default launchers are those in the environment variable MPIZERO_MPIEXEC, or the
mpiexec in the folder of this Python interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MISTAKES = ROOT / "scripts" / "mistakes"
PAGE = ROOT / "docs" / "failures.md"
BEGIN, END = "<!-- mistakes: begin -->", "<!-- mistakes: end -->"
sys.path[:0] = [str(ROOT), str(MISTAKES)]

from case import Mistake, mistakes_of  # noqa: E402

from tests.faults.jobs import Ended, launchers, run_job  # noqa: E402

#: Seconds after which a job counts as hanging.
LIMIT = 60.0


@dataclass(frozen=True)
class Row:
    """Hold the result of one mistake on one number of ranks.

    ``topic`` is the mistake's file, ``done`` says what was done wrong, ``ended`` is the job's end (None if it hangs),
    ``message`` what its user sees, and ``verdict`` "ok" or what is wrong.
    """

    topic: str
    done: str
    ranks: int
    ended: Ended | None
    message: str
    verdict: str

    @property
    def figures(self) -> str:
        """Return the seconds and the exit status of the job as text; "hang" if it did not end."""
        return "hang" if self.ended is None else f"{self.ended.seconds:.1f} s, {self.ended.status}"


def topics(only: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each file of mistakes, and its mistakes by name; ``only`` names the files, empty for all."""
    for path in sorted(MISTAKES.glob("*.py")):
        if path.stem not in ("case", "__init__") and (not only or path.stem in only):
            yield path.stem, mistakes_of(importlib.import_module(path.stem))


def run(launcher: tuple[str, str], topic: str, name: str, ranks: int, expected: Mistake) -> Ended | None:
    """Run the mistake ``name`` of file ``topic`` as a job on ``ranks`` ranks; return its end, or None if it hangs.

    ``launcher`` is an mpiexec and a Python interpreter.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        command, environment = [MISTAKES / f"{topic}.py", name], dict(expected.environment)
        try:
            return run_job(launcher, Path(folder), command, ranks, environment=environment, limit=LIMIT)
        except subprocess.TimeoutExpired:
            return None


def verdict(ended: Ended | None, topic: str, expected: Mistake) -> str:
    """Return "ok" if the job ended as ``expected`` says, "hang" if it did not end, else what is wrong."""
    if ended is None:
        return "hang"
    said = " ".join((ended.out + ended.err).split())
    allowed = (expected.status,) if isinstance(expected.status, int) else expected.status
    wrong = [
        "" if ended.status in allowed else f"status {ended.status}, not {expected.status}",
        *("" if " ".join(piece.split()) in said else f"does not say {piece!r}" for piece in expected.says),
        "" if not expected.names_line or re.search(rf'{topic}\.py(:|", line )\d+', said) else "names no line",
    ]
    return ", ".join(filter(None, wrong)) or "ok"


def message(ended: Ended | None, expected: Mistake) -> str:
    """Return the first line of the job's output that contains the first text of ``expected.says``; "" if none does.

    Source lines of a traceback do not count. The prefix that names the rank is removed.
    """
    if ended is None:
        return ""
    lines = (ended.err + "\n" + ended.out).splitlines()
    said = (line for line in lines if not line.startswith("    "))
    found = next((line for line in said if expected.says and expected.says[0] in line), "")
    return re.sub(r"^\[rank \d+/\d+ [^\]]*\] ", "", found).replace(f"{ROOT}/", "")


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table, with one line for each mistake on all its numbers of ranks."""
    lines = ["| what was done | what is said | ranks: seconds, status |", "|---|---|---|"]
    together: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        together.setdefault((row.topic, row.done), []).append(row)
    for (_, done), same in together.items():
        text = next((row.message for row in reversed(same) if row.message), "").replace("|", r"\|").replace("`", "'")
        figures = "; ".join(f"{row.ranks}: {row.figures}" for row in same)
        lines.append(f"| {done} | `{text}` | {figures} |")
    return "\n".join(lines)


def write_page(text: str) -> None:
    """Write the table ``text`` between the marks "mistakes: begin" and "mistakes: end" in docs/failures.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Run all chosen mistakes, and print their results; exit with status 1 if a job did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", default=[], metavar="TOPIC", help="files of scripts/mistakes")
    parser.add_argument("--launcher", action="append", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--page", action="store_true", help="write the table into docs/failures.md")
    options = parser.parse_args()
    chosen = [tuple(text.split()) for text in options.launcher or ()] or launchers()
    failed, rows = 0, []
    for launcher in chosen:
        for topic, cases in topics(options.only):
            for name, function in cases.items():
                expected: Mistake = function.mistake
                for ranks in (n for n in expected.ranks if n in options.ranks):
                    ended = run(launcher, topic, name, ranks, expected)
                    done, said = function.__doc__.partition("\n")[0].rstrip("."), message(ended, expected)
                    rows.append(row := Row(topic, done, ranks, ended, said, verdict(ended, topic, expected)))
                    failed += row.verdict != "ok"
                    print(f"{topic}.{name}, {ranks} ranks: {row.figures}: {row.verdict}\n    {said}", flush=True)
    print(f"{len({(row.topic, row.done) for row in rows})} mistakes, {len(rows)} jobs, {failed} not as they must be")
    if options.page:
        write_page(table(rows))
    raise SystemExit(int(failed > 0))


if __name__ == "__main__":
    main()
