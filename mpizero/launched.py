"""Read rank, number of ranks and kind of launcher from the environment of this process, without MPI."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from typing import NamedTuple

#: Set by the launchers of MPICH and Open MPI, and by srun with PMI or PMIx, so that MPI can find the other ranks.
BY_MPI = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
#: Set by srun whatever it starts; what an mpiexec inside of a Slurm job says comes first.
BY_ANY = (*BY_MPI, "SLURM_PROCID")

#: Where they tell the number of a process among those of its node.
BY_NODE = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")

#: Where a rank that mpizero watches over tells the programs that it starts that they are none: see :func:`is_rank`.
RANK_PROCESS = "MPIZERO_RANK_PROCESS"


class Launch(NamedTuple):
    """Hold what the environment of this process says of its launcher.

    Attributes
    ----------
    name : str
        For example "srun --mpi=pmix"; "" without a launcher.
    size, rank : int or None
        The number of processes it has started, and which of them this is.
    remedy : str
        What to do when MPI sees another number.
    """

    name: str = ""
    size: int | None = None
    rank: int | None = None
    remedy: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Read an environment.

        Not collective. A launcher's own variables come before Slurm's, for mpiexec may have been started by Slurm; a
        batch script's own process has no launcher.
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
    """Return the rank that the launcher has given this process, 0 without a launcher. Not collective."""
    return _first(environment, BY_ANY, 0)


def launched_place(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those of its node, or its rank where no launcher says. Not collective."""
    return _first(environment, BY_NODE, launched_rank(environment))


def is_several(environment: Mapping[str, str]) -> bool:
    """Tell whether a launcher has started this process as one of several, or does not say how many. Not collective."""
    size = Launch.of(environment).size
    several = any(name in environment for name in BY_MPI) if size is None else size > 1
    return several and is_rank(environment)


def is_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether the launcher's variables are meant for this process. Not collective.

    [Note: programs of a rank] A program that a rank starts inherits them, and a fork of it MPI's own memory too, but
    MPI ends a process that takes another one's place. MPICH's launcher keeps a socket open for each rank, which most
    children do not inherit; a rank of mpizero's leaves its process number and what leads to its launcher in
    :data:`RANK_PROCESS`; and one that is not watched over, or no more, has loaded mpi4py, and is above its programs.
    An mpiexec that a rank starts leads elsewhere.
    """
    process, _, way = environment.get(RANK_PROCESS, "").partition(" ")
    own, _, here = mark(environment).partition(" ")
    return (process in ("", own) or way != here) and _has_socket(environment) and not _below_mpi(environment)


def mark(environment: Mapping[str, str]) -> str:
    """Return the number of this process, and what leads it to its launcher. Not collective."""
    return f"{os.getpid()} {_way(environment)}"


def _way(environment: Mapping[str, str], process: int | None = None) -> str:
    names = ("PMIX_NAMESPACE", "PMI_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return " ".join([*(environment.get(name, "-") for name in names), str(_socket(environment, process))])


def _has_socket(environment: Mapping[str, str]) -> bool:
    return not environment.get("PMI_FD", "").isdecimal() or _socket(environment) is not None


def _socket(environment: Mapping[str, str], process: int | None = None) -> int | None:
    """Return the number by which the system knows the socket to MPICH's launcher; None if it is not open there."""
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
    """Return what the ranks of this node and job, and no others, call their job; "" where nothing tells.

    Not collective. PMIx names it. Otherwise it is the process that has started them: the nearest above this one that
    is not of this rank, for there may be shells between them.
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
    """Return the processes of this rank above this one, the nearest first: shells, or the rank itself."""
    process, way = os.getpid(), _way(environment)
    try:
        while (process := int(_stat(process)[1])) > 1 and _leads(process, way):
            yield process
    except (OSError, IndexError, ValueError):
        pass


def _below_mpi(environment: Mapping[str, str]) -> bool:
    """Tell whether a process of this rank above this one has loaded mpi4py."""
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
    """Tell whether a process was started as a rank in this way; Slurm's own belong to root, and cannot be asked."""
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            entries = [os.fsdecode(entry).partition("=") for entry in file.read().split(b"\0")]
    except PermissionError:
        return False
    environment = {name: value for name, _, value in entries}
    return not environment.keys().isdisjoint(BY_MPI) and _way(environment, process) == way
