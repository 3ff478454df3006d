"""Run one job for each of many typical mistakes of users, and print message, seconds and exit status of each.

    python scripts/mistake_table.py [--ranks 1 2 4] [--only batches ...] [--launcher "mpiexec python" ...] [--page]
    mpiexec -n 4 python scripts/mistake_table.py --run batches.NAME      # one of them, by hand
    python scripts/mistake_table.py --failures [--ranks 2 4 8]           # a rank fails, or calls another collective

The mistakes are the functions in scripts/mistakes/*.py, which declare the expected exit status and message. The exit
status of this script is 1 if a job hangs, ends with another status, or does not print the message. ``--page`` writes
the tables into docs/mistakes.md. With ``--failures`` the last rank of each job fails, or calls a wrong collective, by
the programs of tests/faults; seconds are those from the fault until every rank had ended. The default launchers are
those in the environment variable MPIZERO_MPIEXEC, or the mpiexec in the folder of this Python interpreter.
"""

from __future__ import annotations

import importlib
import itertools
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
FAULTS = ROOT / "tests" / "faults"
#: Faults of the rank that fails, as tests/faults/program.py names them, in the order of the report.
FAILURES = ("raise", "segfault", "kill", "exit_0", "interrupt")
#: Mistakes for which MPICH itself ends a rank; the launcher may return the status of another rank that it killed.
REFUSED = ("count", "dtype")
#: Wrong collectives that the last rank calls, as programs/contract_program.py names them.
MISMATCHES = ("order", "order_at_the_end", "order_of_a_set", "engine", "operation", "extra", "missing", *REFUSED)
#: Seconds within which all ranks must be gone after the fault.
SOON = 5.0
#: Seconds after which a job counts as hanging.
LIMIT = 60.0
#: Characters of a message in the page.
LONGEST = 180
#: Headings of the page, by the files of mistakes.
TITLES = {
    "batches": "Batches",
    "collectives": "Calls and arguments of all ranks",
    "fine_tuning": "Losses, weights and loaded parameters",
    "gradients": "Gradients and layers of your own",
    "jobs": "Ranks that come late or leave early",
    "make": "Functions that a configuration names",
    "models": "Models that check_model refuses",
    "ranks_differ": "Ranks that differ",
    "settings": "Settings, names and types",
    "shapes": "Shapes and types of arrays",
    "training": "Trainer",
}


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
    def end(self) -> str:
        """The exit status of the job as text; "hang" if it did not end."""
        return "hang" if self.ended.late else str(self.ended.status)

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
                command = mpi.command(ranks, [__file__, "--run", f"{file}.{name}"])
                ended = run(command, LIMIT, environment=expected.environment, cwd=Path(folder))
            yield Row(f"{file}.{name}", function.__doc__.partition("\n")[0].rstrip("."), ranks, ended, expected)


def shown(message: str) -> str:
    """Return a message as it stands in the page: without the lines of files that it names, and what differs by run."""
    line = r"[\w./]+\.py(?::|, line )\d+(?: in [\w.<>]+)?"
    text = re.sub(rf"^[\w./]+\.py:\d+: | \(\w+ at {line}\)|,? at {line}(?: > {line})*| \({line}\)", "", message)
    text = re.sub(rf"{tempfile.gettempdir()}/tmp\w+/| at 0x\w*| \(and so with .*", "", text)
    return " ".join(text.split()).replace("|", r"\|").replace("`", "'")


def shortened(text: str, said: set[str]) -> str:
    """Return a message with dots for a beginning or end that an earlier one, in ``said``, has, and for a long middle.

    Its own beginning and end are added to ``said``.
    """
    kind, _, rest = text.partition(": ")
    begin, _, more = rest.partition(": ")
    end = text.partition("; ")[2]
    seen = {part for part in (begin, end) if part in said}
    said.update(part for part in (begin, end) if len(part.split()) >= 5)
    if begin in seen and more:
        text = f"{kind}: ... {more}"
    if end in seen:
        text = text.replace(f"; {end}", "; ...")
    head, _, way_out = text.rpartition("; ")
    if len(text) > LONGEST and len(way_out) < LONGEST - 60:
        text = f"{textwrap.shorten(head, LONGEST - len(way_out), placeholder=' ...')}; {way_out}"
        return text.replace(" ...; ...", " ...")
    return textwrap.shorten(text, LONGEST + 60, placeholder=" ...")


def kind_of(text: str) -> str:
    """Return a message without what differs between mistakes of one kind: names, numbers, calls of models."""
    return re.sub(r"'[^']*'|\b\w*\d[\w.]*|\w+Model\.\w+|ranks? [\d, -]+|\([^)]*\)", "", text)


def statuses(found: Sequence[Row]) -> dict[str, set[str]]:
    """Return the exit statuses of all jobs by the kind of message: what stands before its first colon."""
    ends: dict[str, set[str]] = {}
    for row in found:
        ends.setdefault(shown(row.message).partition(":")[0], set()).add(row.end)
    return ends


def tables(found: Sequence[Row]) -> str:
    """Return the exit statuses, and for each topic a heading and a table with a line for each message."""
    ends = statuses(found)
    by_status: dict[str, list[str]] = {}
    for kind in sorted(kind for kind in ends if len(ends[kind]) == 1):
        by_status.setdefault("".join(ends[kind]), []).append(f"`{kind}`")
    lines = [(status, ", ".join(kinds)) for status, kinds in sorted(by_status.items())]
    pages = [markdown(("status", "messages that begin with"), lines)]
    for topic, title in TITLES.items():
        said, alike = set[str](), dict[tuple[str, str], list[str]]()
        for name in dict.fromkeys(row.name for row in found if row.name.startswith(f"{topic}.")):
            same = [row for row in found if row.name == name]
            text = next((shown(row.message) for row in reversed(same) if row.message), "")
            status = "" if len(ends[text.partition(":")[0]]) == 1 else f", status {same[0].end}"
            if len({row.end for row in same}) > 1:
                status = f", status {', '.join(row.end for row in same)}"
                status += f" on {', '.join(str(row.ranks) for row in same)} ranks"
            cells = alike.setdefault((kind_of(text), status), [])
            if not cells:
                cells.append(f"`{shortened(text, said)}`{status}")
            cells.append(same[0].done)
        if alike:
            lines = [("; ".join(done), message) for message, *done in alike.values()]
            pages.append(f"## {title}\n\n{markdown(('mistake', 'message'), lines)}")
    return "\n\n".join(pages)


# ---------------------------------------------------------------------------------------------- failures


def ended_by(mpi: Mpi, fault: str, ranks: int) -> tuple[Ended, float]:
    """Run a job whose last rank fails or calls a wrong collective, as ``fault`` says.

    Return how it ended, and the seconds from the fault, or else the start, until all ranks were gone.
    """
    with tempfile.TemporaryDirectory() as name:
        program = FAULTS / ("program.py" if fault in FAILURES else "programs/contract_program.py")
        command = mpi.command(ranks, [program, fault, name, *([ranks - 1] if fault in FAILURES else [])])
        ended = run(command, LIMIT, cwd=Path(name))
        faults = [float(path.name.removeprefix("fault-")) for path in Path(name).glob("fault-*")]
    return ended, ended.gone - min(faults) if faults else ended.seconds


def verdict(ended: Ended, seconds: float, fault: str) -> str:
    """Return "ok" if the job with ``fault`` ended as it must, else a text that says what is wrong."""
    tracebacks, wrong = ended.err.count("Traceback (most recent call last)"), fault in MISMATCHES
    reports = ended.err.count("CollectiveMismatch: ") + ended.err.count("stuck: ")
    found = {
        "hang": ended.late,
        "slow": seconds >= SOON,
        f"{ended.strays} processes left": ended.strays,
        "status 0": ended.status == 0,
        f"{tracebacks} tracebacks": fault == "raise" and tracebacks != 1,
        "not named": wrong and ended.err.count("contract_program.py:") < 2,  # the lines of the ranks that differ
        "another status": wrong and ended.status != 76 and fault not in REFUSED,
        "several reports": reports > 1,
    }
    return ", ".join(text for text, is_so in found.items() if is_so) or "ok"


def failures(mpis: Sequence[Mpi], several: Sequence[int]) -> int:
    """Run all jobs in which a rank fails, print a line for each, and return how many did not end as they must."""
    failed = 0
    for mpi, fault, ranks in itertools.product(mpis, (*FAILURES, *MISMATCHES), several):
        ended, seconds = ended_by(mpi, fault, ranks)
        text = verdict(ended, seconds, fault)
        failed += text != "ok"
        print(f"{mpi.mpiexec[-24:]:24} {fault:18} {ranks} ranks {seconds:8.2f} s, {ended.status}: {text}", flush=True)
    return failed


def main() -> None:
    """Run all chosen mistakes, and print their results; exit with status 1 if a job did not end as it must."""
    parser = plain(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", help="(default: 1 2 4; with --failures 2 4 8)")
    parser.add_argument("--failures", action="store_true", help="let the last rank fail, or call another collective")
    parser.add_argument("--only", nargs="+", default=[], metavar="TOPIC", help="files of scripts/mistakes")
    parser.add_argument("--launcher", action="append", metavar="'MPIEXEC PYTHON'")
    parser.add_argument("--page", action="store_true", help="write the tables into docs/mistakes.md")
    parser.add_argument("--run", metavar="TOPIC.NAME", help="make one mistake, as a rank of a job")
    options = parser.parse_args()
    if options.run:
        topic, _, name = options.run.partition(".")
        mistakes_of(importlib.import_module(topic))[name]()
        return
    if options.failures:
        sys.exit(failures(launchers(options.launcher), options.ranks or (2, 4, 8)) > 0)
    found: list[Row] = []
    for mpi in launchers(options.launcher):
        for row in rows(mpi, options.only, options.ranks or (1, 2, 4)):
            found.append(row)
            print(f"{row.name}, {row.ranks} ranks: {row.figures}: {row.verdict}\n    {row.message}", flush=True)
    failed = sum(row.verdict != "ok" for row in found)
    print(f"{len({row.name for row in found})} mistakes, {len(found)} jobs, {failed} not as they must be")
    if options.page:
        marks = "<!-- mistakes: begin -->", "<!-- mistakes: end -->"
        PAGE.write_text(between(PAGE.read_text(), *marks, tables(found), PAGE))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
