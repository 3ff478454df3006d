"""Read rank, number of ranks and kind of launcher from the environment variables of this process, without MPI.

:class:`Launch` holds what the launcher tells. Programs that a rank starts inherit its variables, so :func:`standing`
also looks at the ancestors of this process, to find whether it is a rank itself: see [Note: programs of a rank].
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
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

#: Variables that together identify a rank and its launcher.
_IDENTITY = (
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "PMI_PORT",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_FD",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
)

#: Name of a launcher.
OPEN_MPI = "mpiexec of Open MPI"


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
        step, task = integer_of(environment, "SLURM_STEP_NUM_TASKS"), integer_of(environment, "SLURM_PROCID")
        direct = "use srun --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH); srun --mpi=list tells what there is"
        mpiexec = "use the mpiexec that belongs to the MPI which mpi4py has loaded"
        size, rank = integer_of(environment, "PMI_SIZE"), integer_of(environment, "PMI_RANK")
        if (ranks := integer_of(environment, "OMPI_COMM_WORLD_SIZE")) is not None:
            return cls(OPEN_MPI, ranks, integer_of(environment, "OMPI_COMM_WORLD_RANK"), mpiexec)
        if size is not None and (size, rank) == (step, task):
            return cls(srun, size, rank, direct)
        if size is not None:
            return cls("mpiexec of MPICH's kind", size, rank, mpiexec)
        return cls() if step is None else cls(srun, step, task, direct)


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process; 0 if there is no launcher."""
    return _first(environment, BY_ANY, 0)


def launched_local_rank(environment: Mapping[str, str]) -> int:
    """Return the number of this process among the processes of its node; its rank if the launcher does not tell it."""
    return _first(environment, BY_NODE, launched_rank(environment))


def ranks_of_node(environment: Mapping[str, str]) -> int:
    """Return this process's position among the processes of its node, from 1; 1 if the launcher does not tell it."""
    return _first(environment, BY_NODE, 0) + 1


def is_several(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is one of several ranks of a job.

    The result is also True for a rank whose launcher does not tell how many ranks there are.
    """
    size = Launch.of(environment).size
    several = any(name in environment for name in BY_MPI) if size is None else size > 1
    return several and is_rank(environment)


class Standing(NamedTuple):
    """Tell whether this process is a rank, or a program that a rank has started.

    Attributes
    ----------
    rank : bool
        True for a rank.
    program : bool
        True for a program started by a rank that has loaded MPI: such a program cannot be the rank itself. If neither
        ``rank`` nor ``program`` is true, it is unclear whether the process is meant to be the rank, or to work alone.
    text : str
        The reason why this process is no rank, for messages; "" for a rank.
    """

    rank: bool = True
    program: bool = False
    text: str = ""


def is_rank(environment: Mapping[str, str]) -> bool:
    """Tell whether this process is itself a rank: False if it is, or may be, a program that a rank has started."""
    return standing(environment).rank


def standing(environment: Mapping[str, str]) -> Standing:
    """Find out whether this process is a rank, a program that a rank has started, or something unclear.

    [Note: programs of a rank] A program that a rank starts inherits the launcher's variables. If the program
    initialized MPI with these variables, it would pretend to be that rank, and MPI would end it. But a wrapper between
    the launcher and the rank (a Python launcher, a profiler) looks the same, and the program that it starts *is* the
    rank. These signs tell the two cases apart:

    - an ancestor process under the same launcher has loaded mpi4py: it is the rank, and this process a program of it;
    - the variable :data:`RANK_PROCESS`, which a supervised rank sets, names another process and the same launcher, and
      says that MPI was loaded: this process is a program of that rank, which may have ended since;
    - the same variable says that MPI was not loaded: a rank or a wrapper that has imported mpizero has set it, and the
      case is unclear;
    - the socket that MPICH's launcher opened for the rank is not open in this process, since most children do not
      inherit it. Without any other sign the case is unclear, too, because MPI cannot start without the socket.

    A program that a rank starts through another mpiexec has another launcher, so it counts as a rank.
    """
    ancestors, socket = _ancestors(environment)
    if (process := next(filter(_has_mpi, ancestors), None)) is not None:
        return Standing(False, True, f"{_command(process)} has started this program, and is the rank itself")
    noted, mpi, launcher = [*environment.get(RANK_PROCESS, "").split(" ", 2), "", ""][:3]
    way, _, theirs = launcher.rpartition(" ")
    if noted and way == _way(environment) and (socket is None or theirs == str(socket)):
        if noted == str(os.getpid()):
            return Standing()
        text = f"{_command(int(noted))} has started this program, and "
        text += "is the rank itself" if mpi == "MPI" else "may be the rank itself, as it has imported mpizero"
        return Standing(False, mpi == "MPI", text)
    number = environment.get("PMI_FD", "")
    if not number.isdecimal() or _socket(environment) is not None:
        return Standing()
    holder = next((process for process in ancestors if _socket(environment, process) is not None), None)
    wrapper = "a program between the launcher and this one" if holder is None else _command(holder)
    return Standing(False, False, f"{wrapper} has not passed on the connection to the launcher (PMI_FD={number})")


def unclear(environment: Mapping[str, str]) -> str:
    """Return why it is unclear whether this process is one of several ranks, and what to do; "" if it is clear."""
    state, launch = standing(environment), Launch.of(environment)
    if state.rank or state.program or launch.size == 1:
        return ""
    return (
        f"{launch.name or 'the launcher'} has started {describe_rank(launch)}, but it is not clear whether this "
        f"process is that rank: {state.text}; start ranks without that program, or let it import neither mpizero nor "
        "mpi4py and end in exec or subprocess.run(..., close_fds=False)"
    )


def launched_without_mpi(environment: Mapping[str, str]) -> str:
    """Return why processes of torchrun or another launcher without MPI are no ranks; "" without such a launcher."""
    count = environment.get("WORLD_SIZE", "")
    if not {"RANK", "LOCAL_RANK"} <= set(environment) or not count.isdecimal() or int(count) < 2:
        return ""
    launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "a launcher that is none of MPI's"
    return (
        f"{launcher} has started {count} processes (WORLD_SIZE), of which each would train alone: start the ranks by "
        f"mpiexec -n {count} python, or srun"
    )


def describe_rank(launch: Launch) -> str:
    """Return "rank 1 of 4", as far as the launcher tells it."""
    return "a rank" if launch.rank is None else f"rank {launch.rank} of {launch.size or 'several'}"


def is_first(environment: Mapping[str, str]) -> bool:
    """Tell whether this process prints for its job: it is rank 0 of the launcher, or not clearly a rank."""
    return launched_rank(environment) == 0 or not is_rank(environment)


def mark(environment: Mapping[str, str]) -> str:
    """Return the value for :data:`RANK_PROCESS`: process ID, whether MPI is loaded, and identity of the launcher."""
    mpi = "MPI" if "mpi4py.MPI" in sys.modules else "-"
    return f"{os.getpid()} {mpi} {_way(environment)} {_ancestors(environment)[1]}"


def _way(environment: Mapping[str, str]) -> str:
    return " ".join(environment.get(name, "-") for name in _IDENTITY)


def _socket(environment: Mapping[str, str], process: int | None = None) -> int | None:
    """Return the inode of the socket between a process and MPICH's launcher; None if the process has none open.

    ``process`` is a process ID; None means this process.
    """
    text = environment.get("PMI_FD", "")
    if not text.isdecimal():
        return None
    try:
        status = os.stat(int(text) if process is None else f"/proc/{process}/fd/{text}")
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), default)


def integer_of(environment: Mapping[str, str], name: str) -> int | None:
    """Return an environment variable as an integer; None if it is not set or no whole number."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else None


def job_name(environment: Mapping[str, str]) -> str:
    """Return a name that identifies this job on this node, the same on all of the job's ranks; "" if there is none.

    The name is the namespace of PMIx if one is set. Otherwise it consists of the process ID and the start time of the
    launcher process. The launcher process is the nearest ancestor process that does not belong to this rank (a rank may
    be started through shells).
    """
    if namespace := environment.get("PMIX_NAMESPACE"):
        return "".join(c if c.isalnum() else "-" for c in namespace)
    *_, launcher = [os.getpid(), *_ancestors(environment)[0]]
    try:
        launcher = int(_stat(launcher)[1])
        return f"{launcher}-{_stat(launcher)[19]}" if launcher > 1 else ""  # when it began: numbers come again
    except (OSError, IndexError, ValueError):  # no such file system
        return ""


def _ancestors(environment: Mapping[str, str]) -> tuple[list[int], int | None]:
    """Return the process IDs of the ancestors that belong to the same rank, nearest first, and the launcher's socket.

    The ancestors are shells, wrappers, or the rank that has started this program. The socket to the launcher is given
    as its inode; None if neither this process nor an ancestor has it open. Above a process that has the socket open,
    ancestors belong to the same rank only as long as they have the same socket open, too.
    """
    ancestors: list[int] = []
    process, way, socket = os.getpid(), _way(environment), _socket(environment)
    try:
        while (process := int(_stat(process)[1])) > 1:
            theirs = _variables(process)
            if theirs.keys().isdisjoint(BY_MPI) or _way(theirs) != way:
                break
            above = _socket(theirs, process)
            if socket not in (None, above):
                break
            socket = above
            ancestors.append(process)
    except (OSError, IndexError, ValueError):  # no such file system, or a process of another user, as Slurm's own
        pass
    return ancestors, socket


def _has_mpi(process: int) -> bool:
    """Tell whether a process has loaded mpi4py's library."""
    try:
        return b"/mpi4py/" in Path(f"/proc/{process}/maps").read_bytes()
    except OSError:
        return False


def _command(process: int) -> str:
    """Return the command line of a process with its process ID, for messages."""
    try:
        words = os.fsdecode(Path(f"/proc/{process}/cmdline").read_bytes()).replace("\0", " ").strip()
    except OSError:
        words = ""
    return " ".join(filter(None, ["process", str(process), f"({words[:100]})" if words else ""]))


def _variables(process: int) -> dict[str, str]:
    """Return the environment variables that a process was started with."""
    entries = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return {name: value for name, _, value in (os.fsdecode(entry).partition("=") for entry in entries)}


def _stat(process: int) -> list[str]:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
