"""Find the ranks that a launcher has started, and describe their MPI library."""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

from mpizero._util.launch import Launch, is_rank, is_several, place_of, standing, unclear
from mpizero._util.text import stacklevel
from mpizero.comm.communicator import Communicator
from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.errors import ConfigError
from mpizero.guard import guard

#: What to do where a command is to work alone.
ALONE = "a program that is to work alone is started without the variables PMI*, OMPI* and SLURM*"
_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class MpiFacts:
    """Describe the MPI library of this process.

    Attributes
    ----------
    vendor, version, library : str
        For example "MPICH", "4.2.3", and the first line of the library's own description.
    mpi4py : str
        Version of mpi4py.
    thread_level : str
        The thread level that MPI provides: "SINGLE", "FUNNELED", "SERIALIZED" or "MULTIPLE".
    """

    vendor: str
    version: str
    library: str
    mpi4py: str
    thread_level: str


def world() -> Communicator:
    """Return a communicator of all processes that the launcher has started.

    Collective over COMM_WORLD; starts MPI. The caller closes the result. If MPI cannot be loaded and there is only this
    process, the result is a communicator of this process without MPI. So it is in a program that a rank has started,
    which is told so by a warning.

    Raises
    ------
    ConfigError
        If MPI sees another number of processes than the launcher has started (the launcher belongs to another MPI
        library), if the launcher has started several processes and MPI cannot be loaded, or if a program between the
        launcher and this one has closed the connection to the launcher.
    """
    launch = Launch.of(os.environ)
    launcher = launch.name or "the launcher"
    if _works_alone(launch, ALONE):
        return one_process()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if launch.size in (None, 1):
            return one_process()
        raise ConfigError(
            f"{launcher} has started {launch.size} processes, but MPI cannot be loaded: {error}; "
            "install an MPI library, for example: pip install mpich"
        ) from None
    from mpizero.comm.mpi import MpiCommunicator

    _check_size(MPI, launch)
    return MpiCommunicator(MPI.COMM_WORLD)


def one_process(name: str = "world") -> Communicator:
    """Return a communicator of this process alone, without MPI. Not collective."""
    return InMemoryCommunicator.group(1, name=name)[0]


def default_world() -> Any:
    """Return mpi4py's COMM_WORLD, the meaning of ``comm=None``, if a launcher has started several ranks; else None.

    Not collective, but starts MPI if there are several ranks. Returns None, with a warning, in a program that a rank
    has started as a subprocess, because such a program is not a rank itself.

    Raises
    ------
    ConfigError
        If MPI sees another number of processes than the launcher has started, cannot be loaded, or has been finalized,
        or if it is not clear whether this process is a rank.
    """
    launch, loaded = Launch.of(os.environ), sys.modules.get("mpi4py.MPI")
    way_out = 'comm="self" is this process alone'
    if _works_alone(launch, way_out):
        return None
    if not is_several(os.environ) and (loaded is None or not loaded.Is_initialized()):
        return None
    guard.current().before_mpi_starts()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"comm=None is the world of {launch.name or 'the launcher'}, but MPI cannot be loaded: {error}; {way_out}"
        ) from None
    if MPI.Is_finalized():
        raise ConfigError(f"comm=None is the launcher's world, but MPI has been finalized; {way_out}")
    _check_size(MPI, launch, f"; {way_out}")
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def _works_alone(launch: Launch, way_out: str) -> bool:
    """Tell whether this process is a program that a rank has started, see [Note: programs of a rank]; warn if so.

    Raises ConfigError with ``way_out`` if it may be a rank that a wrapper has cut off from the launcher: all ranks
    would work alone, each as if it were the whole job.
    """
    if text := unclear(os.environ):
        raise ConfigError(f"{text}; {way_out}")
    found = standing(os.environ)
    if found.program and launch.size != 1:
        text = f"this program works alone, as one process: {found.text}, {place_of(launch)} of {launch.name}"
        warnings.warn(f"{text} (without this warning: {way_out})", RuntimeWarning, stacklevel=stacklevel())
    return not found.rank


def _check_size(mpi: Any, launch: Launch, way_out: str = "") -> None:
    """Raise ConfigError if MPI sees another number of processes than the launcher has started.

    ``way_out`` is added to the end of the message.
    """
    size = mpi.COMM_WORLD.Get_size()
    if launch.size not in (None, size):
        raise ConfigError(
            f"{launch.name} has started {launch.size} processes, but each sees {size}: it belongs to another MPI than "
            f"the one that mpi4py has loaded, which is {' '.join(map(str, mpi.get_vendor()[:1]))}, or starts none; "
            f"{launch.remedy or 'use its own mpiexec'}{way_out}"
        )


def mpi_facts() -> MpiFacts | None:
    """Return the name, version and thread level of the MPI library; None if it cannot be loaded in this process.

    Not collective, but starts MPI.
    """
    if not is_rank(os.environ):
        return None
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
