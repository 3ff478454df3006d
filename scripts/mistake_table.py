"""Run one job for each of many typical mistakes of users, and print message, seconds and exit status of each.

    python scripts/mistake_table.py [--ranks 1 2 4] [--only batches ...] [--launcher "mpiexec python" ...] [--page]

The mistakes are the functions in scripts/mistakes/*.py, which declare the expected exit status and message. The exit
status of this script is 1 if a job hangs, ends with another status, or does not print the message. ``--page`` writes
the table into docs/mistakes.md. The default launchers are those in the environment variable MPIZERO_MPIEXEC, or the
mpiexec in the folder of this Python interpreter.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISTAKES = Path(__file__).with_name("mistakes")
sys.path.insert(0, str(MISTAKES))

from case import Mistake, mistakes_of  # noqa: E402
from harness.jobs import ROOT, Ended, Mpi, launchers, run  # noqa: E402
from harness.options import plain  # noqa: E402
from harness.tables import between, markdown  # noqa: E402

PAGE = ROOT / "docs" / "mistakes.md"
#: Seconds after which a job counts as hanging.
LIMIT = 60.0


@dataclass(frozen=True)
class Row:
    """Hold the result of one mistake on one number of ranks.

    ``name`` is the mistake's file and function, ``done`` says what was done wrong.
    """

    name: str
    done: str
    ranks: int
    ended: Ended
    expected: Mistake

    @property
    def figures(self) -> str:
        """The seconds and the exit status of the job as text; "hang" if it did not end."""
        return "hang" if self.ended.late else f"{self.ended.seconds:.1f} s, {self.ended.status}"

    @property
    def verdict(self) -> str:
        """What is wrong with the end of the job; "ok" if nothing is."""
        if self.ended.late:
            return "hang"
        said, file = " ".join((self.ended.out + self.ended.err).split()), self.name.partition(".")[0]
        status = self.expected.status
        wrong = [
            "" if self.ended.status in ((status,) if isinstance(status, int) else status) else f"not status {status}",
            *("" if " ".join(piece.split()) in said else f"does not say {piece!r}" for piece in self.expected.says),
            "" if not self.expected.names_line or re.search(rf'{file}\.py(:|", line )\d+', said) else "names no line",
        ]
        return ", ".join(filter(None, wrong)) or "ok"

    @property
    def message(self) -> str:
        """The first line of the job's output that contains the first expected text; "" if none does.

        Source lines of a traceback do not count. The prefix that names the rank is removed.
        """
        lines = (self.ended.err + "\n" + self.ended.out).splitlines()
        said = (line for line in lines if not line.startswith("    ") and self.expected.says)
        found = next((line for line in said if self.expected.says[0] in line), "")
        return re.sub(r"^\[rank \d+/\d+ [^\]]*\] ", "", found).replace(f"{ROOT}/", "")


def mistakes(only: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield file, name and function of each mistake; ``only`` names the files, empty for all."""
    for path in sorted(MISTAKES.glob("*.py")):
        if path.stem not in ("case", "__init__") and (not only or path.stem in only):
            for name, function in mistakes_of(importlib.import_module(path.stem)).items():
                yield path.stem, name, function


def rows(mpi: Mpi, only: Sequence[str], several: Sequence[int]) -> Iterator[Row]:
    """Run the chosen mistakes as jobs, each on those numbers of ranks that it has of ``several``; yield their rows."""
    for file, name, function in mistakes(only):
        expected: Mistake = function.mistake
        for ranks in (n for n in expected.ranks if n in several):
            with tempfile.TemporaryDirectory() as folder:
                command = mpi.command(ranks, [MISTAKES / f"{file}.py", name])
                ended = run(command, LIMIT, environment=expected.environment, cwd=Path(folder))
            yield Row(f"{file}.{name}", function.__doc__.partition("\n")[0].rstrip("."), ranks, ended, expected)


def shown(message: str) -> str:
    """Return a message as a cell of the table, without what differs from run to run, its line and a long end."""
    text = re.sub(r" \([\w./]+\.py:\d+ in [^()]*\)$", "", message)
    text = re.sub(rf"{tempfile.gettempdir()}/tmp\w+/| at 0x\w*", "", text)
    return textwrap.shorten(text, 320, placeholder=" ...").replace("|", r"\|").replace("`", "'")


def table(found: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, with one line for each mistake on all its numbers of ranks."""
    lines = []
    for name in dict.fromkeys(row.name for row in found):
        same = [row for row in found if row.name == name]
        text = shown(next((row.message for row in reversed(same) if row.message), ""))
        ends = [(row.ranks, "hang" if row.ended.late else str(row.ended.status)) for row in same]
        different = len({end for _, end in ends}) > 1
        told = dict.fromkeys(f"{ranks}: {end}" if different else end for ranks, end in ends)
        lines.append((same[0].done, f"`{text}`", "; ".join(told), f"{max(row.ended.seconds for row in same):.1f}"))
    return markdown(("what was done", "what is said", "status", "seconds"), lines)


def main() -> None:
    """Run all chosen mistakes, and print their results; exit with status 1 if a job did not end as it must."""
    parser = plain(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", default=[], metavar="TOPIC", help="files of scripts/mistakes")
    parser.add_argument("--launcher", action="append", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--page", action="store_true", help="write the table into docs/mistakes.md")
    options = parser.parse_args()
    found: list[Row] = []
    for mpi in launchers(options.launcher):
        for row in rows(mpi, options.only, options.ranks):
            found.append(row)
            print(f"{row.name}, {row.ranks} ranks: {row.figures}: {row.verdict}\n    {row.message}", flush=True)
    failed = sum(row.verdict != "ok" for row in found)
    print(f"{len({row.name for row in found})} mistakes, {len(found)} jobs, {failed} not as they must be")
    if options.page:
        marks = "<!-- mistakes: begin -->", "<!-- mistakes: end -->"
        PAGE.write_text(between(PAGE.read_text(), *marks, table(found), PAGE))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
