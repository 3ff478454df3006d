"""Run the members of an ensemble on groups of ranks of one job, or one member in a job of its own.

:func:`run_members` calls a function for every :class:`Member`, and writes the outcome of each into its folder.
:func:`summarize_members` writes one summary of all members, also if they have run in different jobs.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mpizero._util.checks import require, whole
from mpizero._util.text import notice, write_atomic
from mpizero.comm import Communicator
from mpizero.comm.agreement import agree_equal, all_ranks, from_rank_0
from mpizero.comm.startup import communicator_of
from mpizero.errors import ArgumentError, CollectiveError, ConfigError, DataError, MemberError, PeerFailure
from mpizero.guard.reports import describe_error
from mpizero.train.loop import Preempted
from mpizero.train.setup import TrainingResult

#: Names of two files: the outcome of one member, in the member's folder, and the summary, in the ensemble's folder.
OUTCOME, SUMMARY = "member.json", "ensemble.json"
#: How a member has ended; a member without an outcome is unfinished: it runs, or was killed.
COMPLETE, FAILED, UNFINISHED = "complete", "failed", "unfinished"


@dataclass(frozen=True)
class Member:
    """Describe one member of an ensemble to the function that trains it.

    Attributes
    ----------
    number : int
        Number of the member, from 0: use it for the seed, or as an index of hyper-parameters.
    comm : Communicator
        The ranks of the member: ``ShardingConfig(comm=member.comm)``.
    run : Path
        Folder of the member's run: ``Trainer(..., run=member.run)``.

    Examples
    --------
    >>> import mpizero as mz
    >>> def train(member):  # a real one trains on member.comm, with member.number as its seed
    ...     return {"ranks": member.comm.size, "folder": member.run.name}
    >>> mz.run_members(train, 1, "self")["members"][0]["result"]
    {'ranks': 1, 'folder': 'member_0000'}
    """

    number: int
    comm: Communicator
    run: Path


def run_members(
    function: Callable[[Member], Any],
    members: int,
    comm: Any = None,
    *,
    run: str | Path = "run",
    on_failure: Literal["end", "continue"] = "end",
    only: int | None = None,
) -> dict[str, Any]:
    """Call ``function(member)`` for all members side by side, each on its own ranks, and return a summary.

    Collective over ``comm``, whose ranks are divided evenly among the members, in order. Each member has its own folder
    in ``run``, and the summary is the file ``ensemble.json`` there.

    Parameters
    ----------
    function : callable
        Trains one member and returns its result: a :class:`TrainingResult`, or a dictionary of JSON values.
    members : int
        Number of members.
    comm : mpi4py communicator, Communicator, "self" or None
        The ranks to divide among the members; None means all ranks that the launcher has started.
    run : path
        Folder of the ensemble; all ranks see it.
    on_failure : {"end", "continue"}
        What an exception of ``function`` does: "end" ends the job immediately; with "continue" the exception is
        printed, the ranks of the member wait for the other members, and then all ranks raise MemberError.
        CollectiveError and PeerFailure end the job in any case.
    only : int or None
        Run only the member with this number, on all ranks. Each member can thus run as a job of its own; these jobs
        share one summary.

    Returns
    -------
    dict
        The summary, see :func:`summarize_members`; the same on all ranks.

    Raises
    ------
    MemberError
        With "continue", on every rank, if a member has failed.
    Preempted
        On every rank, after all members have ended, if a member was asked to stop; a second call may resume that
        member.
    ConfigError
        On every rank, if the ranks cannot be divided evenly, or an argument is not allowed.

    Examples
    --------
    >>> import mpizero as mz
    >>> def train(member):
    ...     return {"loss": 1.0 + member.number}
    >>> summaries = mz.testing.run_in_threads(4, lambda comm: mz.run_members(train, 2, comm, run="ensemble"))
    >>> summaries[0]["figures"]["loss"]
    {'mean': 1.5, 'deviation': 0.5, 'least': 1.0, 'largest': 2.0}
    """
    with communicator_of(comm) as world:
        with all_ranks(world):
            _check(function, members, world.size, on_failure, only)
        settings = {"members": members, "run": str(run), "on_failure": on_failure, "only": only}
        agree_equal(world, lambda: {"the arguments of run_members": settings}, "agree run_members")
        root = os.path.abspath(run)  # still valid if a member changes the working directory
        number = world.rank * members // world.size if only is None else only
        with world.split(number, name=f"member {number}") as group:
            member = Member(number, group, member_folder(root, number))
            status = _run(function, member, keeps_going=on_failure == "continue")
            _wait_for_all(world)
        summary = from_rank_0(world, lambda: summarize_members(root, members), "members")
        ended = dict(world.allgather_object((number, status), "members"))
    _raise_unless_complete(summary["members"], ended)
    return summary


def _raise_unless_complete(members: list[dict[str, Any]], ended: Mapping[int, str]) -> None:
    """Raise an error if a member of this job, whose status is in ``ended``, has failed or was asked to stop."""
    for status, kind, what in ((FAILED, MemberError, "have failed"), (UNFINISHED, Preempted, "were asked to stop")):
        if those := sorted(number for number, outcome in ended.items() if outcome == status):
            errors = "; ".join(f"member {one}: {members[one].get('error', '')}" for one in those)
            raise kind(f"{len(those)} of {len(ended)} members {what}: {errors}")


def _check(function: object, members: object, size: int, on_failure: object, only: object) -> None:
    if not callable(function):
        raise ArgumentError(f"run_members: function={function!r:.80}: expected a function of a member")
    count = require("run_members: members", members, whole(1))
    if on_failure not in ("end", "continue"):
        raise ConfigError(f'run_members: on_failure={on_failure!r}: expected "end" or "continue"')
    if only is not None:
        if require("run_members: only", only, whole(0)) >= count:
            raise ConfigError(f"run_members: only={only}: expected the number of a member, 0 to {count - 1}")
    elif size % count:
        raise ConfigError(f"run_members: members={count}: the job has {size} ranks, which these cannot share evenly")


def _run(function: Callable[[Member], Any], member: Member, *, keeps_going: bool) -> str:
    """Train a member, write its outcome, and return its status. Collective over the member's ranks.

    With ``keeps_going``, return the status "failed" after an error of ``function``; otherwise raise the error.
    """
    outcome: dict[str, Any]
    with all_ranks(member.comm, "member"):
        if member.comm.rank == 0:
            member.run.mkdir(parents=True, exist_ok=True)
            (member.run / OUTCOME).unlink(missing_ok=True)  # of an earlier run: unfinished from now on
    try:
        with all_ranks(member.comm, "member"):
            outcome = {"status": COMPLETE, "result": _as_json(function(member))}
    except (CollectiveError, PeerFailure):  # other ranks may be in a call that never ends
        raise
    except Preempted as stop:  # on all ranks of the member
        outcome = {"status": UNFINISHED, "error": str(stop)}
    except Exception as error:
        outcome = {"status": FAILED, "error": describe_error(error)}
        if not keeps_going:
            if member.comm.rank == 0:
                write_outcome(member.run, outcome)
            raise
        if member.comm.rank == 0:
            notice(f"member {member.number} has failed, the others go on: {outcome['error']}")
            traceback.print_exc()
    with all_ranks(member.comm, "member"):
        if member.comm.rank == 0:
            write_outcome(member.run, outcome)
    return str(outcome["status"])


def _as_json(result: Any) -> Mapping[str, Any]:
    if isinstance(result, TrainingResult):
        return result.to_dict()
    if isinstance(result, Mapping | None):
        return dict(result or {})
    raise ArgumentError(
        f"run_members: the function returned {type(result).__name__}: expected a TrainingResult or a dictionary"
    )


#: Longest pause between two looks at whether all members have ended, in seconds.
_PAUSE = 0.05


def _wait_for_all(world: Communicator) -> None:
    """Poll until all members have ended. No single MPI call lasts long, so no timeout limits the training."""
    request = world.ibarrier("members")
    while not request.test():
        time.sleep(_PAUSE)


def member_folder(run: str | Path, number: int) -> Path:
    """Return the folder of a member's run in the folder ``run`` of the ensemble."""
    return Path(run) / f"member_{number:04d}"


def write_outcome(folder: Path, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a member into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / OUTCOME, json.dumps(outcome, indent=1).encode())


def summarize_members(run: str | Path, members: int | None = None) -> dict[str, Any]:
    """Read the outcomes of all members in the folder ``run``, write the summary ``ensemble.json``, and return it.

    The members may have run in one job or in many. Not collective.

    Parameters
    ----------
    run : path
        Folder of the ensemble.
    members : int or None
        Number of members; None means all up to the last one that has a folder.

    Returns
    -------
    dict
        "members": one dictionary each, with "member", "status" ("complete", "failed" or "unfinished") and "result" or
        "error". "counts": the number of members of each status. "figures": for each number in the results of all
        complete members, its "mean", "deviation" (standard deviation, divisor n), "least" and "largest".

    Raises
    ------
    DataError
        If the folder holds no member, or an outcome cannot be read.

    Examples
    --------
    >>> import mpizero as mz
    >>> def train(member):
    ...     return {"loss": 1.0 + member.number}
    >>> for number in range(2):  # as two jobs do
    ...     _ = mz.run_members(train, 2, "self", run="ensemble", only=number)
    >>> mz.summarize_members("ensemble")["figures"]["loss"]["mean"]
    1.5
    """
    if members is None:  # up to the last that has a folder
        numbers = [path.name.removeprefix("member_") for path in Path(run).glob("member_*")]
        members = 1 + max((int(number) for number in numbers if number.isdecimal()), default=-1)
    if not members:
        raise DataError(f"{run}: holds no folder of a member, such as {member_folder(run, 0).name}")
    outcomes = [{"member": number, **_outcome(member_folder(run, number))} for number in range(members)]
    statuses = [one["status"] for one in outcomes]
    summary = {
        "members": outcomes,
        "counts": {status: statuses.count(status) for status in (COMPLETE, FAILED, UNFINISHED)},
        "figures": _statistics([one["result"] for one in outcomes if one["status"] == COMPLETE]),
    }
    write_atomic(Path(run) / SUMMARY, json.dumps(summary, indent=1).encode())
    return summary


def _outcome(folder: Path) -> dict[str, Any]:
    path = folder / OUTCOME
    try:
        outcome = json.loads(path.read_bytes())
        return {"status": str(outcome["status"]), **outcome}
    except FileNotFoundError:
        return {"status": UNFINISHED}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the outcome of a member: {error}") from None


def _statistics(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    by_name = {}
    for name in results[0] if results else ():
        values = [result.get(name) for result in results]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            column = np.array(values, np.float64)
            summary = {"mean": column.mean(), "deviation": column.std(), "least": column.min(), "largest": column.max()}
            by_name[name] = {key: float(value) for key, value in summary.items()}
    return by_name
