"""Kill trainings at random moments and resume them; check that they end with the result of an uninterrupted one."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness.jobs import Ended, Job, run

from mpizero import checkpoint
from torturing.cases import Torture, hidden, problem_of_ending, problem_of_newest

#: Steps of a run, each with a checkpoint; most kills of one run before it is left to end.
STEPS, KILLS = 45, 10
SETTINGS = {"direct": [], "background": ["checkpoint.asynchronous=true"], "mpio": ["checkpoint.backend=mpio"]}
CONFIG = """
[model]
name = "mlp"
hidden = [96, 96]

[data]
arrays = {{x = "{0}/x.npy", y = "{0}/y.npy"}}
validation = 0.0

[parallel]
strategy = "zero1"

[train]
steps = {1}
global_batch = 8
micro_batch = 1
validate_every = 0

[optimizer]
name = "adamw"
lr = 1e-3

[checkpoint]
every = 1
keep = 2
"""


class Reference:
    """Run a training without interruption, and hold its results.

    ``result`` is the hash of the parameters at its end, ``hashes`` has the hash of the checkpoint of each step, and
    ``checkpoints`` is the folder of these checkpoints.
    """

    def __init__(self, torture: Torture) -> None:
        self.home = torture.folder / "reference"
        self.home.mkdir()
        draw = np.random.default_rng(torture.options.seed)
        np.save(self.home / "x.npy", draw.normal(size=(64, 24)).astype(np.float32))
        np.save(self.home / "y.npy", draw.integers(0, 4, 64))
        self.config = self.home / "config.toml"
        self.config.write_text(CONFIG.format(self.home, STEPS), encoding="utf-8")
        self.checkpoints, self._torture = checkpoints_of(self.home), torture
        ended = self.run(self.home, settings=["checkpoint.keep=1000"], patience=3)
        if ended.status:
            raise SystemExit(f"an undisturbed training fails:\n{ended.err}")
        self.result = result_of(ended)
        self.hashes = {checkpoint.step_of(path): contents(path) for path in self.checkpoints.iterdir()}

    def run(
        self,
        folder: Path,
        how: str = "direct",
        meanwhile: Callable[[Job], bool] | None = None,
        settings: Sequence[str] = (),
        before: Sequence[str] = (),
        patience: float = 1.0,
    ) -> Ended:
        """Run the same training in the folder of a case, from the newest checkpoint there; return how it ended.

        ``how`` is the way to save, ``settings`` are others than those of this training, ``before`` are words before the
        command line, and ``patience`` is how many times the usual limit the job may take.
        """
        given = [f"checkpoint.folder={checkpoints_of(folder)}", *SETTINGS[how], *settings]
        words = ["train", self.config, *(word for setting in given for word in ("--set", setting)), "--resume"]
        command = self._torture.mpi_of(how).command(self._torture.options.ranks, ["-m", "mpizero", *words])
        job = Path(tempfile.mkdtemp(prefix="job-", dir=folder))
        return run([*before, *command], patience * self._torture.limit, job, meanwhile=meanwhile)

    def problem_of(self, checkpoints: Path, at_least: int) -> str:
        """Return what is wrong with the newest checkpoint of another run of this training; "" if nothing is.

        It must be of step ``at_least`` or later, and have the same contents as in the uninterrupted run.
        """

        def problem_of(newest: str) -> str:
            step = checkpoint.step_of(newest)
            return "" if contents(newest) == self.hashes[step] else f"{newest} holds something else"

        return problem_of_newest(checkpoints, at_least, problem_of)


def checkpoints_of(folder: Path) -> Path:
    """Return the folder of checkpoints of a training that runs in the folder of a case."""
    return folder / "run" / "checkpoints"


def contents(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of the step and all arrays of a checkpoint."""
    with checkpoint.open_checkpoint(path) as reader:
        found = hashlib.sha256(str(reader.attributes["training"]["step"]).encode())
        for name in sorted(reader.arrays):
            found.update(name.encode() + reader.read_whole(name).tobytes())
    return found.hexdigest()


def result_of(ended: Ended) -> str:
    """Return the hash of the parameters that a training has printed at its end; "" if it has printed none."""
    try:
        return str(json.loads(ended.out.splitlines()[-1])["parameters_sha256"])
    except (IndexError, ValueError, KeyError):
        return ""


def newest_seen(checkpoints: Path) -> int:
    """Return the highest step that has a checkpoint in the folder ``checkpoints``; 0 if there is none."""
    try:
        return max((checkpoint.step_of(name) or 0 for name in os.listdir(checkpoints)), default=0)
    except FileNotFoundError:
        return 0


def kill_at_random(torture: Torture, reference: Reference, how: str, count: int) -> None:
    """Kill one rank, all ranks or the launcher of a training at a random moment, resume it, and kill it again.

    After at most ten kills a training may go on to its end, where its result must be that of ``reference``. New
    trainings begin until there were ``count`` kills.
    """
    killed = torture.table.row(f"killed at a random moment of training, {how}")
    ends = torture.table.row(f"runs that went on to their end, {how}")
    random = torture.random
    while killed.cases < count and ends.cases < count:
        with torture.case() as folder:
            checkpoints = checkpoints_of(folder)
            kills = min(KILLS, count - killed.cases)
            done = 0
            for number in range(kills):
                plan = _Kill(
                    checkpoints,
                    1 + (STEPS - 6) * number // KILLS,
                    random.uniform(0, torture.options.window),
                    random.choice(["launcher", "all", *(f"rank {r}" for r in range(torture.options.ranks))]),
                )
                ended = reference.run(folder, how, plan)
                if not ended.status and (not plan.struck or plan.seen == STEPS):
                    break  # ranks may outlive their launcher, and even reach the end
                problem = (
                    problem_of_ending(ended) if plan.struck else f"not reached step {plan.step}: {ended.err[-300:]}"
                )
                middle = any(name.startswith(".tmp-step") for name in hidden(checkpoints))
                problem = problem or reference.problem_of(checkpoints, plan.seen)
                killed.add(problem, "in a save" if middle else "between saves", f"{plan.victim}, step {plan.seen}")
                done += 1
            ended = reference.run(folder, how)
            ends.add(_problem_of_end(ended, reference, checkpoints), "with the same hash", f"after {done} kills")


def _problem_of_end(ended: Ended, reference: Reference, checkpoints: Path) -> str:
    if ended.status or ended.late or ended.strays:
        return f"exit status {ended.status}, {ended.strays} processes left: {ended.err[-300:]}"
    if result_of(ended) != reference.result:
        return f"another result: {ended.out[-300:]}"
    if hidden(checkpoints):
        return f"{hidden(checkpoints)} stayed"
    return reference.problem_of(checkpoints, STEPS)


class _Kill:
    """Kill a job ``delay`` seconds after it has saved ``step``; ``victim`` is as for :meth:`Job.kill`.

    :func:`run` calls it every few milliseconds. ``seen`` is the last saved step at the kill, and ``struck`` says
    whether the job was still running then.
    """

    def __init__(self, checkpoints: Path, step: int, delay: float, victim: str) -> None:
        self.victim, self.struck, self.seen = victim, False, 0
        self._checkpoints, self.step, self._delay = checkpoints, step, delay
        self._moment = 0.0
        self._start = newest_seen(checkpoints)

    def __call__(self, job: Job) -> bool:
        """Kill the job if its time has come; tell whether that was done, so that no further call is needed."""
        now, newest = time.monotonic(), newest_seen(self._checkpoints)
        if not self._moment and newest >= self.step and newest > self._start:
            self._moment = now + self._delay
        if not self._moment or now < self._moment:
            return False
        self.seen = newest
        self.struck = job.process.poll() is None
        job.kill(self.victim)
        return True


def after_step(folder: Path, step: int, action: Callable[[Job], Any]) -> Callable[[Job], bool]:
    """Return a function for ``meanwhile`` of :meth:`Reference.run` that calls ``action`` once ``step`` is saved."""

    def look(job: Job) -> bool:
        if newest_seen(checkpoints_of(folder)) < step:
            return False
        action(job)
        return True

    return look
