"""Prepare the folder of a case (one disturbed job), and check the checkpoints that it leaves."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.jobs import Ended, Mpi
from harness.outcomes import Table

from mpizero import checkpoint
from mpizero.errors import CheckpointError
from torturing import saver

SAVER = str(Path(saver.__file__))


@dataclass(eq=False)
class Torture:
    """Hold the options of a run of scripts/torture.py, its temporary folder, and the results so far.

    ``mpis`` are the MPI libraries, "first" and maybe "second". ``made`` is the number of cases that were begun.
    """

    options: argparse.Namespace
    folder: Path
    mpis: dict[str, Mpi]
    table: Table = field(default_factory=Table)
    made: int = 0

    @property
    def random(self) -> random.Random:
        """A new random number generator, whose seed is computed from ``--seed`` and the number of rows of the table."""
        return random.Random(f"{self.options.seed} {len(self.table.rows)}")

    @property
    def limit(self) -> float:
        """The largest number of seconds that one job may take."""
        return float(self.options.limit)

    @contextmanager
    def case(self) -> Iterator[Path]:
        """Yield an empty folder for a case; remove it at the end of the ``with`` block if ``--keep`` is not given."""
        self.made += 1
        folder = self.folder / f"case-{self.made:05d}"
        folder.mkdir(parents=True)
        try:
            yield folder
        finally:
            if not self.options.keep:
                shutil.rmtree(folder, ignore_errors=True)

    def mpi_of(self, how: str) -> Mpi:
        """Return the MPI library for a way to save: for "mpio" the second one, with parallel HDF5, else the first."""
        return self.mpis["second" if how == "mpio" else "first"]


def prepare(folder: Path, steps: int = 1) -> Path:
    """Create ``folder/run`` with checkpoints of steps 1 to ``steps`` as saver.py writes them; return its path."""
    run = folder / "run"
    run.mkdir()
    for step in range(1, steps + 1):
        checkpoint.write(checkpoint.step_folder(run, step), saver.pieces(step, 0, 1), {"step": step})
    return run


def acknowledged(run: Path) -> int:
    """Return the last step whose save by saver.py into ``run`` has returned; 0 if none has."""
    with contextlib.suppress(FileNotFoundError, IndexError, ValueError):
        return int((run.parent / "acknowledged").read_text().splitlines()[-1])
    return 0


def hidden(run: Path) -> list[str]:
    """Return the names in folder ``run`` that begin with a dot: temporary files of saves, which must not be left."""
    return sorted(name for name in os.listdir(run) if name.startswith("."))


def problem_of_newest(run: Path, at_least: int, problem_of: Callable[[str], str]) -> str:
    """Return what is wrong with the newest checkpoint in ``run``, or "" if nothing is.

    It must be of step ``at_least`` or later, and ``problem_of(path)`` say nothing of it; none is as good as step 0.
    """
    passed: list[str] = []
    try:
        newest = checkpoint.latest(run, report=passed.append)
    except CheckpointError as error:
        return f"a checkpoint that cannot be opened was committed: {error}"
    step = checkpoint.step_of(newest) if newest else 0
    if passed:
        return f"a damaged checkpoint was committed: {passed}"
    if step is None or step < at_least:
        return f"step {at_least} was there before, the newest on disk is {newest}"
    try:
        return "" if newest is None else problem_of(newest)
    except Exception as error:
        return f"{newest} does not load: {error}"


def problem_of_folder(run: Path, at_least: int = 1) -> str:
    """Return what is wrong with the newest checkpoint that saver.py has written into ``run``, or "" if nothing is.

    It must load with the values of saver.py, be no older than the last save that has returned, and of step ``at_least``
    or later.
    """

    def problem_of(newest: str) -> str:
        checkpoint.verify(newest)
        return saver.problem_of(newest)

    return problem_of_newest(run, max(at_least, acknowledged(run)), problem_of)


def problem_of_next_save(run: Path) -> str:
    """Save and prune once more in ``run``; return what goes wrong or which other files are left, or "" if none are."""
    try:
        newest = checkpoint.latest(run)
        step = (checkpoint.step_of(newest) or 0 if newest else 0) + 1
        target = checkpoint.step_folder(run, step)
        checkpoint.write(target, saver.pieces(step, 0, 1), {"step": step})
        checkpoint.prune(run, 1)
    except Exception as error:
        return f"the next save failed: {error}"
    left = sorted(os.listdir(run))
    return "" if left == [os.path.basename(target)] else f"after the next save there is {left}"


def problem_of_ending(ended: Ended, *, expected: bool = True) -> str:
    """Return what is wrong with the end of a job, or "" if nothing is.

    The job must end in time and leave no process. Its exit status must not be 0 if ``expected``, and must be 0 if not.
    """
    if ended.late:
        return f"still running after {ended.seconds:.0f} s"
    if ended.strays:
        return f"{ended.strays} processes were left behind"
    return "" if bool(ended.status) == expected else f"exit status {ended.status}; {ended.err[-300:]}"


def quiet() -> contextlib.redirect_stderr[io.StringIO]:
    """Return a context manager that drops what is written to ``sys.stderr``."""
    return contextlib.redirect_stderr(io.StringIO())
