"""The ranks that a launcher started, and what their MPI is."""

from __future__ import annotations

from dataclasses import dataclass

from mpizero.comm.communicator import Communicator
from mpizero.comm.convert import as_communicator
from mpizero.errors import ConfigError

_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class MpiFacts:
    """What a process knows of its MPI.

    Attributes
    ----------
    vendor, version, library : str
        For example "MPICH", "4.2.3", and the first line that the library says of itself.
    mpi4py : str
        Version of the binding.
    thread_level : str
        "SINGLE", "FUNNELED", "SERIALIZED" or "MULTIPLE".
    """

    vendor: str
    version: str
    library: str
    mpi4py: str
    thread_level: str


def world(launched: int | None = None, launcher: str = "", remedy: str = "") -> Communicator:
    """Return a communicator over all processes that were started together; one process without MPI is a world too.

    Collective over MPI's world; starts MPI. The caller closes the result.

    Parameters
    ----------
    launched : int, optional
        Number of processes that the launcher says it has started, None without a launcher.
    launcher, remedy : str, optional
        Its name, and what to do where MPI sees another number, for the error.

    Raises
    ------
    ConfigError
        The launcher has started more processes than MPI sees (it belongs to another MPI), or MPI cannot be loaded.
    """
    launcher = launcher or "the launcher"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launched is None or launched == 1:
            return as_communicator(None)
        raise ConfigError(
            f"{launcher} has started {launched} processes, but MPI cannot be loaded: {error}; "
            "install an MPI library, for example: pip install mpich"
        ) from None
    size = MPI.COMM_WORLD.Get_size()
    if launched is not None and size != launched:
        raise ConfigError(
            f"{launcher} has started {launched} processes, but each sees {size}: it belongs to another MPI than the "
            f"one that mpi4py has loaded, which is {' '.join(map(str, MPI.get_vendor()[:1]))}, or starts none; "
            f"{remedy or 'use its own mpiexec'}"
        )
    return as_communicator(MPI.COMM_WORLD)


def mpi_facts() -> MpiFacts | None:
    """Return what is known of MPI, None where it cannot be loaded.

    Not collective, but starts MPI.
    """
    try:
        import mpi4py
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    vendor, version = MPI.get_vendor()
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    return MpiFacts(
        vendor=vendor,
        version=".".join(map(str, version)),
        library=MPI.Get_library_version().strip("\0\n ").splitlines()[0].strip(),
        mpi4py=mpi4py.__version__,
        thread_level=_LEVELS[levels.index(MPI.Query_thread())],
    )
