"""Read rank, number of ranks and kind of launcher from the environment variables of this process, without MPI."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: Variables that hold the rank, set for MPI by the launchers of MPICH and Open MPI, and by srun with PMI or PMIx.
BY_MPI = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
#: All variables that may hold the rank, most trusted first. srun sets SLURM_PROCID for any program, so an mpiexec
#: inside a Slurm job overrides it.
BY_ANY = (*BY_MPI, "SLURM_PROCID")

#: Variables that hold the number of a process among those of its node.
BY_NODE = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

#: Variable that a supervised rank sets, so that programs which it starts know that they are not ranks: :func:`is_rank`.
RANK_PROCESS = "MPIZERO_RANK_PROCESS"


class Launch(NamedTuple):
    """Describe the launcher of this process, as found in its environment variables.

    Attributes
    ----------
    name : str
        The launcher, for example "srun --mpi=pmix"; "" if no launcher started this process.
    size, rank : int or None
        The number of processes that the launcher has started, and the number (from 0) of this process among them. None
        if the environment does not tell it.
    remedy : str
        Advice for the error message that is raised if MPI finds a number of ranks other than ``size``.
    """

    name: str = ""
    size: int | None = None
    rank: int | None = None
    remedy: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Find the launcher in environment variables.

        The variables of mpiexec are preferred to the variables of Slurm, because mpiexec may run inside a Slurm job.
        The process of a batch script itself has no launcher, although Slurm has started it.
        """
        kind = environment.get("SLURM_MPI_TYPE", "")
        srun = f"srun --mpi={kind}" if kind else "srun"
        step, task = _number(environment, "SLURM_STEP_NUM_TASKS"), _number(environment, "SLURM_PROCID")
        direct = "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); srun --mpi=list tells what there is"
        own = "use the mpiexec that belongs to the MPI which mpi4py has loaded"
        size, rank = _number(environment, "PMI_SIZE"), _number(environment, "PMI_RANK")
        if (ranks := _number(environment, "OMPI_COMM_WORLD_SIZE")) is not None:
            return cls("mpiexec of Open MPI", ranks, _number(environment, "OMPI_COMM_WORLD_RANK"), own)
        if size is not None and (size, rank) == (step, task):
            return cls(srun, size, rank, direct)
        if size is not None:
            return cls("mpiexec of MPICH's kind", size, rank, own)
        return cls() if step is None else cls(srun, step, task, direct)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process; 0 if there is no launcher."""
    return _first(environment, BY_ANY, 0)


def launched_place(environment: Mapping[str, str]) -> int:
    """Return the number of this process among the processes of its node; its rank if the launcher does not tell it."""
    return _first(environment, BY_NODE, launched_rank(environment))


def ranks_of_node(environment: Mapping[str, str]) -> int:
    """Return the number of processes of this node up to this one; 1 if the launcher does not tell its place."""
    return _first(environment, BY_NODE, 0) + 1


def is_several(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is one of several ranks of a job.

    The result is also True for a rank whose launcher does not tell how many ranks there are.
    """
    size = Launch.of(environment).size
    several = any(name in environment for name in BY_MPI) if size is None else size > 1
    return several and is_rank(environment)


def is_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is itself a rank: False if it is a program that a rank has started.

    [Note: programs of a rank] A program that a rank starts inherits the launcher's variables. If the program
    initialized MPI with these variables, it would pretend to be that rank, and MPI would end it. Any of three signs
    shows that a process is such a program:

    - :data:`RANK_PROCESS`, which a supervised rank sets, holds another process ID and the same launcher;
    - the socket that MPICH's launcher opened for the rank is not open in this process, since most children do not
      inherit it;
    - an ancestor process under the same launcher has loaded mpi4py. This sign finds programs of ranks that mpizero does
      not supervise.

    A program that a rank starts through another mpiexec has another launcher, so it counts as a rank.
    """
    process, _, way = environment.get(RANK_PROCESS, "").partition(" ")
    own, _, here = mark(environment).partition(" ")
    open_here = not environment.get("PMI_FD", "").isdecimal() or _socket(environment) is not None
    return (process in ("", own) or way != here) and open_here and not _below_mpi(environment)


def mark(environment: Mapping[str, str]) -> str:
    """Return the value for :data:`RANK_PROCESS`: the process ID and a text that identifies the launcher."""
    return f"{os.getpid()} {_way(environment)}"


def _way(environment: Mapping[str, str], process: int | None = None) -> str:
    names = ("PMIX_NAMESPACE", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return " ".join([*(environment.get(name, "-") for name in names), str(_socket(environment, process))])


def _socket(environment: Mapping[str, str], process: int | None = None) -> int | None:
    """Return the inode of the socket between a process and MPICH's launcher; None if the process has none open.

    ``process`` is a process ID; None means this process.
    """
    text = environment.get("PMI_FD", "")
    if not text.isdecimal():
        return None
    try:
        found = os.stat(int(text) if process is None else f"/proc/{process}/fd/{text}")
    except OSError:
        return None
    return found.st_ino if stat.S_ISSOCK(found.st_mode) else None


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), default)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name that identifies this job on this node, the same on all of the job's ranks; "" if there is none.

    The name is the namespace of PMIx if one is set. Otherwise it consists of the process ID and the start time of the
    launcher process. That is the nearest ancestor process that does not belong to this rank (a rank may be started
    through shells).
    """
    if namespace := environment.get("PMIX_NAMESPACE"):
        return "".join(c if c.isalnum() else "-" for c in namespace)
    *_, launcher = [os.getpid(), *_above(environment)]
    try:
        launcher = int(_stat(launcher)[1])
        return f"{launcher}-{_stat(launcher)[19]}" if launcher > 1 else ""  # when it began: numbers come again
    except (OSError, IndexError, ValueError):  # no such file system
        return ""


def _above(environment: Mapping[str, str]) -> Iterator[int]:
    """Yield the process IDs of the ancestor processes that belong to the same rank, nearest first.

    They are shells, or the rank that started this program.
    """
    process, way = os.getpid(), _way(environment)
    try:
        while (process := int(_stat(process)[1])) > 1 and _leads(process, way):
            yield process
    except (OSError, IndexError, ValueError):
        pass


def _below_mpi(environment: Mapping[str, str]) -> bool:
    """Tell whether an ancestor process that belongs to the same rank has loaded mpi4py."""
    try:
        for process in _above(environment):
            with open(f"/proc/{process}/maps", "rb") as file:
                if b"/mpi4py/" in file.read():
                    return True
    except OSError:
        pass
    return False


def _stat(process: int) -> list[str]:
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()


def _leads(process: int, way: str) -> bool:
    """Tell whether a process has the launcher variables of a rank, and the launcher that ``way`` identifies.

    The result is False for a process of another user, whose environment cannot be read. Slurm's own processes, for
    example, belong to root.
    """
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            entries = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0")]
    except PermissionError:
        return False
    environment = {name: value for name, _, value in entries}
    return not environment.keys().isdisjoint(BY_MPI) and _way(environment, process) == way
