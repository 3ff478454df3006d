"""Save to folders that are full, read-only or removed, and from two jobs into one folder."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.jobs import Ended, Job, run
from harness.outcomes import Row

from mpizero import checkpoint
from torturing.cases import SAVER, Torture, acknowledged, hidden, prepare, problem_of_ending, problem_of_folder
from torturing.training import SETTINGS, Reference, after_step, newest_seen

#: How often making a disk read-only is tried.
_TRIES = 2000


def have_namespaces() -> str:
    """Return the reason why this process cannot mount file systems; "" if it can."""
    if os.geteuid() or shutil.which("unshare") is None:
        return "needs root and unshare"
    works = subprocess.run(
        ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], stderr=subprocess.DEVNULL, check=False
    )
    return "" if works.returncode == 0 else "no file system may be mounted here"


def _judge(row: Row, reference: Reference, ended: Ended, checkpoints: Path, text: Sequence[str], at_least: int) -> None:
    """Add the result of a training that should have failed to ``row``.

    The training must end with an error that contains one of the texts ``text`` and no traceback. It must leave no
    temporary files. The newest checkpoint must load, and be of step ``at_least`` or later.
    """
    problem = problem_of_ending(ended)
    if not problem and (not any(part in ended.err for part in text) or "Traceback" in ended.err):
        problem = f"not a clear error: {ended.err[-600:]}"
    if not problem and checkpoints.exists() and hidden(checkpoints):
        problem = f"{hidden(checkpoints)} stayed"
    if not problem and checkpoints.exists():
        problem = reference.problem_of(checkpoints, at_least)
    row.add(problem, f"clear error, {newest_seen(checkpoints) and 'last good one kept' or 'nothing there'}", text[0])


def full_disks(torture: Torture, reference: Reference, how: str, count: int) -> None:
    """Train on ``count`` file systems of different sizes, all too small for the checkpoints that are kept.

    ``how`` is the way to save: "direct", "background" or "mpio".
    """
    row = torture.table.row(f"a full disk, {how}")
    one = sum(file.stat().st_size for file in Path(checkpoint.step_folder(reference.checkpoints, 1)).iterdir())
    for number in range(count):
        with torture.case() as folder:
            disk, copy = folder / "disk", folder / "copy"
            disk.mkdir()
            size = int(one * (0.5 + 2.4 * number / max(1, count - 1)))
            mount = f"mount -t tmpfs -o size={size} none {disk}"
            script = f'{mount} && {{ "$@"; status=$?; cp -a {disk} {copy}; exit $status; }}'
            program = reference.program(disk / "checkpoints", SETTINGS[how])
            command = torture.mpi_of(how).command(torture.options.ranks, program)
            ended = run(["unshare", "-m", "bash", "-c", script, "full", *command], torture.limit, folder / "job")
            _judge(row, reference, ended, copy / "checkpoints", ["No space left on device"], 0)


def small_files(torture: Torture, reference: Reference, how: str) -> None:
    """Limit the size of files (RLIMIT_FSIZE) from step 2 of a training on, on one rank or on all; needs no root.

    ``how`` is the way to save: "direct", "background" or "mpio".
    """
    row = torture.table.row(f"files that may not grow, {how}")
    size = Path(checkpoint.step_folder(reference.checkpoints, 1), "state.h5").stat().st_size // 2
    for victim in (None, *range(torture.options.ranks)):
        with torture.case() as folder:
            checkpoints = folder / "run" / "checkpoints"
            command = torture.mpi_of(how).command(torture.options.ranks, reference.program(checkpoints, SETTINGS[how]))

            def limit(job: Job, victim: int | None = victim) -> None:
                for pid, rank in job.processes().items():
                    if rank >= 0 and victim in (None, rank):
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

            ended = run(command, torture.limit, folder / "job", meanwhile=after_step(checkpoints, 2, limit))
            _judge(row, reference, ended, checkpoints, ["File too large"], 2)


def read_only(torture: Torture, reference: Reference, how: str) -> None:
    """Make the checkpoint folder read-only during a training: by remounting it, and by the attribute "immutable".

    ``how`` is the way to save: "direct", "background" or "mpio".
    """
    row = torture.table.row(f"a folder that becomes read-only, {how}")
    ranks = torture.options.ranks
    with torture.case() as folder:
        checkpoints = folder / "run" / "checkpoints"
        checkpoints.mkdir(parents=True)

        def remount(job: Job) -> None:
            enter = ["nsenter", "-t", str(job.process.pid), "-m"]
            mount = [*enter, "mount", "-o", "remount,bind,ro", str(checkpoints)]
            for _ in range(_TRIES):  # the system refuses while a file there is open to be written
                if subprocess.run(mount, check=False, capture_output=True).returncode == 0:
                    return
                time.sleep(0.002)
            subprocess.run(mount, check=True)

        command = torture.mpi_of(how).command(ranks, reference.program(checkpoints, SETTINGS[how]))
        script = f'mount --bind {checkpoints} {checkpoints} && exec "$@"'
        ended = run(
            ["unshare", "-m", "bash", "-c", script, "bind", *command],
            torture.limit,
            meanwhile=after_step(checkpoints, 3, remount),
        )
        # Files half written when the disk becomes read-only cannot be removed; the next save removes them.
        _sweep(checkpoints)
        _judge(row, reference, ended, checkpoints, ["Read-only file system"], 3)
    with torture.case() as folder:
        checkpoints = folder / "run" / "checkpoints"
        freeze = ["chattr", "+i", str(checkpoints)]
        command = torture.mpi_of(how).command(ranks, reference.program(checkpoints, SETTINGS[how]))
        works: list[int] = []
        try:
            ended = run(
                command,
                torture.limit,
                meanwhile=after_step(
                    checkpoints, 3, lambda job: works.append(subprocess.run(freeze, check=False).returncode)
                ),
            )
        finally:
            subprocess.run(["chattr", "-i", str(checkpoints)], stderr=subprocess.DEVNULL, check=False)
        if works == [0]:
            _sweep(checkpoints)
            _judge(row, reference, ended, checkpoints, ["Operation not permitted"], 3)


def _sweep(checkpoints: Path) -> None:
    """Remove temporary files that saves could not remove from a read-only disk, as the next save would."""
    for name in hidden(checkpoints):
        if name.startswith(".tmp-"):
            shutil.rmtree(checkpoints / name)


def deleted(torture: Torture, reference: Reference, how: str) -> None:
    """Remove a folder during a training: the folder of checkpoints, or that of the whole run.

    ``how`` is the way to save: "direct", "background" or "mpio".
    """
    row = torture.table.row(f"a folder that is deleted, {how}")
    for name in ("checkpoints", ""):
        with torture.case() as folder:
            checkpoints = folder / "run" / "checkpoints"
            settings = [*SETTINGS[how], "train.steps=100000"]  # it must not end before the folder is removed
            command = torture.mpi_of(how).command(torture.options.ranks, reference.program(checkpoints, settings))

            def away(job: Job, victim: Path = folder / "run" / name, trash: Path = folder / "trash") -> None:
                victim.rename(trash)
                shutil.rmtree(trash)

            ended = run(command, torture.limit, folder / "job", meanwhile=after_step(checkpoints, 3, away))
            _judge(row, reference, ended, checkpoints, ["has been removed", "No such file or directory"], 0)


def two_jobs(torture: Torture, reference: Reference) -> None:
    """Start two jobs that save into one folder.

    A job may fail only because the other one uses the folder, and its error must say so. All checkpoints must be whole.
    """
    row = torture.table.row("two jobs in one folder")
    with torture.case() as folder:
        run_folder = prepare(folder)
        program = [SAVER, run_folder, "12", "direct", "2", "0.02"]
        command = torture.mpis["first"].command(torture.options.ranks, program)
        ends = _both(command, torture.limit)
        refusals = [ended for ended in ends if ended.status]
        problem = next((e.err[-500:] for e in refusals if "another run" not in e.err and "exists" not in e.err), "")
        problem = problem or problem_of_folder(run_folder, acknowledged(run_folder))
        row.add(problem, f"{len(refusals)} of 2 turned away", "two that only save")
    with torture.case() as folder:
        checkpoints = folder / "run" / "checkpoints"
        train = torture.mpis["first"].command(torture.options.ranks, reference.program(checkpoints))
        ends = _both(train, torture.limit)
        refusals = [ended for ended in ends if ended.status]
        problem = next((e.err[-500:] for e in refusals if "in use by" not in e.err), "")
        row.add(problem or reference.problem_of(checkpoints, 1), f"{len(refusals)} of 2 turned away", "two that train")


def _both(command: Sequence[str], limit: float) -> list[Ended]:
    with ThreadPoolExecutor() as threads:
        return list(threads.map(lambda _: run(command, limit), range(2)))
