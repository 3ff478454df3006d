"""Define the command ``mpizero requeue``, with which a batch script ends: its options and what it does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mpizero._util.text import show
from mpizero.errors import ConfigError, ExitStatus
from mpizero.train.cli.options import add_training, whole_number


def add_command(commands: Any, run: Callable[[argparse.Namespace], int]) -> None:
    """Add ``mpizero requeue`` to the commands; ``run`` executes it, given the parsed options."""
    parser = commands.add_parser(
        "requeue",
        help="put this Slurm job into the queue again, if its training has to go on",
        description="End a batch script: with the exit status of the training and its arguments, put the job into the "
        "queue again, or say why not. Exit status 0 if it is put into the queue, else 1.",
        epilog='Example: python -m mpizero requeue "$status" config.toml && sleep 60',
    )
    parser.add_argument("status", metavar="STATUS", type=whole_number, help="exit status of the training")
    parser.add_argument("config", metavar="CONFIG.toml", help="what was trained; or the run's folder")
    add_training(parser)
    parser.add_argument(
        "--max-restarts", metavar="N", type=whole_number, default=50, help="at most so often (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Decide about the job of this batch script; return 0 if it was put into the queue again."""
    from mpizero.train import stopping
    from mpizero.train.run_folder import RunFolder

    if not (job := environment.get("SLURM_JOB_ID", "")):
        raise ConfigError("SLURM_JOB_ID is not set: requeue is for the end of a Slurm batch script")
    restarts = whole_number(environment.get("SLURM_RESTART_COUNT") or "0")
    status, reason = options.status, ""
    if status in (ExitStatus.DATA, ExitStatus.CONFIG):  # the configuration may be what cannot be read
        return _told(status, "it would fail again")
    folder = RunFolder(_checkpoints(options))
    if status == ExitStatus.OK:
        (folder.root / stopping.NOTE).unlink(missing_ok=True)
        return 1
    last = stopping.Visit.read(folder.root, job)
    members = sorted(folder.root.glob("member_*/checkpoints"))
    state = stopping.state_of_job(job)
    visit = stopping.Visit.after(last, job, status, [folder.checkpoints, *members], state.used)
    if folder.stopped.exists():
        reason = f"stopped by the file {folder.stop_file}"
    elif options.resume_from is not None:
        reason = "--resume-from is for one visit, each further one would go back to that step: submit without it"
    elif restarts >= options.max_restarts:
        reason = f"{restarts} restarts are the limit"
    if reason := reason or stopping.why_not_again(visit, last, state):
        return _told(status, reason)
    visit.write(folder.root)
    show(f"requeue: exit status {status} at {visit.place}, restart {restarts + 1}", sys.stderr)
    stopping.requeue(job)
    return int(ExitStatus.OK)


def _told(status: int, reason: str) -> int:
    show(f"requeue: exit status {status}; not requeued: {reason}", sys.stderr)
    return 1


def _checkpoints(options: argparse.Namespace) -> Path:
    """Return the folder of checkpoints of the run that the options mean."""
    from mpizero.train.config.toml import ConfigDocument, parse_config, read_config

    if (folder := Path(options.config)).is_dir():
        inside = folder / "checkpoints"
        return inside if inside.is_dir() else folder
    document = ConfigDocument(options.config, read_config(options.config), [*options.overrides, *options.changed])
    with document.located():
        return Path(parse_config(document, {"train.threads": "1"}).checkpoint.folder)
