"""Where launchers tell a process its rank; MPI need not run."""

from __future__ import annotations

from collections.abc import Mapping

#: Set by the launchers of MPICH and Open MPI, and by srun with PMI or PMIx, so that MPI can find the other ranks.
BY_MPI = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
#: Set by srun whatever it starts; what an mpiexec inside of a Slurm job says comes first.
BY_ANY = (*BY_MPI, "SLURM_PROCID")

#: Where they tell the number of a process among those of its node.
BY_NODE = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def launched_rank(environment: Mapping[str, str]) -> int:
    """Return the rank that the launcher has given this process, 0 without a launcher. Not collective."""
    return _first(environment, BY_ANY, 0)


def launched_place(environment: Mapping[str, str]) -> int:
    """Return the number of this process among those of its node, or its rank where no launcher says. Not collective."""
    return _first(environment, BY_NODE, launched_rank(environment))


def _first(environment: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    return next((int(environment[name]) for name in names if environment.get(name, "").isdecimal()), default)
