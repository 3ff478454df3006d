"""Save to folders that are full, read-only or removed, and from two jobs into one folder."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness.jobs import Ended, Job, run
from harness.outcomes import Row

from mpizero import checkpoint
from torturing.cases import SAVER, Torture, hidden, prepare, problem_of_ending, problem_of_folder
from torturing.training import Reference, after_step, checkpoints_of, newest_seen

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
    """Train on ``count`` file systems of different sizes, all too small for the checkpoints that are kept."""
    row = torture.table.row(f"a full disk, {how}")
    one = sum(file.stat().st_size for file in Path(checkpoint.step_folder(reference.checkpoints, 1)).iterdir())
    for number in range(count):
        with torture.case() as folder:
            disk, copy = folder / "run", folder / "copy"
            disk.mkdir()
            size = int(one * (0.5 + 2.4 * number / max(1, count - 1)))
            mount = f"mount -t tmpfs -o size={size} none {disk}"
            script = f'{mount} && {{ "$@"; status=$?; cp -a {disk} {copy}; exit $status; }}'
            ended = reference.run(folder, how, before=["unshare", "-m", "bash", "-c", script, "full"])
            _judge(row, reference, ended, copy / "checkpoints", ["No space left on device"], 0)


def small_files(torture: Torture, reference: Reference, how: str) -> None:
    """Limit the size of files (RLIMIT_FSIZE) from step 2 of a training on, on one rank or on all; needs no root."""
    row = torture.table.row(f"files that may not grow, {how}")
    size = Path(checkpoint.step_folder(reference.checkpoints, 1), "state.h5").stat().st_size // 2
    for victim in (None, *range(torture.options.ranks)):
        with torture.case() as folder:

            def limit(job: Job, victim: int | None = victim) -> None:
                for pid, rank in job.processes().items():
                    if rank >= 0 and victim in (None, rank):
                        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, size))

            ended = reference.run(folder, how, after_step(folder, 2, limit))
            _judge(row, reference, ended, checkpoints_of(folder), ["File too large"], 2)


def read_only(torture: Torture, reference: Reference, how: str) -> None:
    """Make the checkpoint folder read-only during a training: by remounting it, and by the attribute "immutable"."""
    row = torture.table.row(f"a folder that becomes read-only, {how}")
    for text in ("Read-only file system", "Operation not permitted"):
        with torture.case() as folder:
            checkpoints, before, works = checkpoints_of(folder), list[str](), list[bool]()
            checkpoints.mkdir(parents=True)

            def succeeds(*command: object) -> bool:
                return subprocess.run([*map(str, command)], check=False, capture_output=True).returncode == 0

            def remount(job: Job, checkpoints: Path = checkpoints, works: list[bool] = works) -> None:
                enter = ("nsenter", "-t", job.process.pid, "-m")
                for _ in range(_TRIES):  # the system refuses while a file there is open to be written
                    if succeeds(*enter, "mount", "-o", "remount,bind,ro", checkpoints):
                        works.append(True)
                        return
                    time.sleep(0.002)

            def freeze(job: Job, checkpoints: Path = checkpoints, works: list[bool] = works) -> None:
                works.append(succeeds("chattr", "+i", checkpoints))

            remounts = text.startswith("Read-only")
            if remounts:
                bind = f'mount --bind {checkpoints} {checkpoints} && exec "$@"'
                before = ["unshare", "-m", "bash", "-c", bind, "bind"]
            try:
                ended = reference.run(
                    folder, how, after_step(folder, 3, remount if remounts else freeze), before=before
                )
            finally:
                succeeds("chattr", "-i", checkpoints)
            # Files half written when the disk becomes read-only cannot be removed; the next save removes them.
            for name in hidden(checkpoints):
                if name.startswith(".tmp-"):
                    shutil.rmtree(checkpoints / name)
            if remounts or works == [True]:  # not every file system has the attribute
                _judge(row, reference, ended, checkpoints, [text], 3)


def deleted(torture: Torture, reference: Reference, how: str) -> None:
    """Remove a folder during a training: the folder of checkpoints, or that of the whole run."""
    row = torture.table.row(f"a folder that is deleted, {how}")
    for name in ("checkpoints", ""):
        with torture.case() as folder:

            def away(job: Job, victim: Path = folder / "run" / name, trash: Path = folder / "trash") -> None:
                victim.rename(trash)
                shutil.rmtree(trash)

            endless = ["train.steps=100000"]  # it must not end before the folder is removed
            ended = reference.run(folder, how, after_step(folder, 3, away), endless)
            said = ["has been removed", "No such file or directory"]
            _judge(row, reference, ended, checkpoints_of(folder), said, 0)


def two_jobs(torture: Torture, reference: Reference) -> None:
    """Start two jobs that save into one folder.

    A job may fail only because the other one uses the folder, and its error must say so. All checkpoints must be whole.
    """
    row = torture.table.row("two jobs in one folder")
    with torture.case() as folder:
        run_folder = prepare(folder)
        program = [SAVER, run_folder, "12", "direct", "2", "0.02"]
        command = torture.mpis["first"].command(torture.options.ranks, program)
        problem, outcome = _both(lambda: run(command, torture.limit), "another run", "exists")
        problem = problem or problem_of_folder(run_folder)
        row.add(problem, outcome, "two that only save")
    with torture.case() as folder:
        problem, outcome = _both(lambda: reference.run(folder), "in use by")
        row.add(problem or reference.problem_of(checkpoints_of(folder), 1), outcome, "two that train")


def _both(start: Callable[[], Ended], *excuses: str) -> tuple[str, str]:
    """Run two jobs at once; return what one says that failed without one of the excuses, and how many failed."""
    with ThreadPoolExecutor() as threads:
        refusals = [job.result() for job in [threads.submit(start) for _ in range(2)] if job.result().status]
    problem = next((ended.err[-500:] for ended in refusals if not any(text in ended.err for text in excuses)), "")
    return problem, f"{len(refusals)} of 2 turned away"
