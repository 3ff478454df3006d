"""Find the ranks of a job before its first message, convert ``comm`` arguments, and compare the ranks' software.

:func:`world` and :func:`default_world` find the processes that a launcher has started. Public functions convert their
argument ``comm`` by :func:`as_communicator`. Importing mpi4py starts MPI, so it is imported only where it is needed.
Before a training starts, :func:`agree_to_start` checks that all ranks have the same software and settings.
:func:`available_memory` tells how much memory this process may still allocate within the limits of the node, of its
control groups (in containers) and of its Slurm job.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from mpizero._util.launch import (
    Launch,
    describe_rank,
    integer_of,
    is_rank,
    is_several,
    launched_without_mpi,
    standing,
    unclear,
)
from mpizero._util.text import installed_version, stacklevel
from mpizero.comm.agreement import agree_equal
from mpizero.comm.communicator import Communicator
from mpizero.comm.threads import InMemoryCommunicator
from mpizero.errors import ArgumentError, CollectiveError, ConfigError, PeerFailure
from mpizero.guard import guard
from mpizero.guard.heartbeat import ARRIVAL_PATIENCE

#: Hint in messages: how a command that is to work alone is started.
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
    process, the result is a communicator of this process without MPI. A program that a rank has started gets such a
    communicator too, with a warning.

    Raises
    ------
    ConfigError
        If MPI sees another number of processes than the launcher has started (the launcher belongs to another MPI
        library), if the launcher has started several processes and MPI cannot be loaded, or if it is not clear whether
        this process is a rank, for example because a program between the launcher and this one has closed the
        connection to the launcher.
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
    launch = Launch.of(os.environ)
    loaded: Any = sys.modules.get("mpi4py.MPI")
    hint = 'comm="self" is this process alone'
    if _works_alone(launch, hint):
        return None
    unused = loaded is None or not loaded.Is_initialized()
    if not is_several(os.environ) and (unused or loaded.COMM_WORLD.Get_size() == 1):
        if text := launched_without_mpi(os.environ):
            raise ConfigError(f"{text}; {hint}")
        if unused:
            return None
    guard.current().before_mpi_starts()
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"comm=None is the world of {launch.name or 'the launcher'}, but MPI cannot be loaded: {error}; {hint}"
        ) from None
    if MPI.Is_finalized():
        raise ConfigError(f"comm=None is the launcher's world, but MPI has been finalized; {hint}")
    _check_size(MPI, launch, f"; {hint}")
    return MPI.COMM_WORLD if MPI.COMM_WORLD.Get_size() > 1 else None


def _works_alone(launch: Launch, hint: str) -> bool:
    """Tell whether this process is a program that a rank has started; warn if so, unless the job has one process.

    See [Note: programs of a rank] in _util/launch.py. Raises ConfigError with ``hint`` if this process may be a rank
    that a wrapper has cut off from the launcher: then all ranks would work alone, each as if it were the whole job.
    """
    if text := unclear(os.environ):
        raise ConfigError(f"{text}; {hint}")
    role = standing(os.environ)
    if role.program and launch.size != 1:
        text = f"this program works alone, as one process: {role.text}, {describe_rank(launch)} of {launch.name}"
        warnings.warn(f"{text} (without this warning: {hint})", RuntimeWarning, stacklevel=stacklevel())
    return not role.rank


def _check_size(mpi: Any, launch: Launch, hint: str = "") -> None:
    """Raise ConfigError if MPI sees another number of processes than the launcher has started.

    ``hint`` is added to the end of the message.
    """
    size = mpi.COMM_WORLD.Get_size()
    if launch.size not in (None, size):
        raise ConfigError(
            f"{launch.name} has started {launch.size} processes, but each sees {size}: it belongs to another MPI than "
            f"the one that mpi4py has loaded, which is {' '.join(map(str, mpi.get_vendor()[:1]))}, or starts none; "
            f"{launch.remedy or 'use its own mpiexec'}{hint}"
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


def as_communicator(
    comm: Any = None, name: str = "world", *, timeout: float | None = ARRIVAL_PATIENCE, embedded: bool = False
) -> Communicator:
    """Convert an mpi4py communicator, a Communicator, "self" or None to a Communicator.

    From an mpi4py communicator a new one of the same ranks is split off: the call is collective over these ranks, and
    the caller closes the result. A Communicator is returned unchanged. None means all ranks if a launcher has started
    several; then the call is collective over all ranks, and starts MPI. Without a launcher None means this process
    alone. "self" means this process alone, without MPI. All ranks must make the call within ``timeout`` seconds; None
    is no limit. ``embedded`` says that mpizero runs inside another program, see :class:`~mpizero.ShardingConfig`.

    Raises
    ------
    ArgumentError
        If ``comm`` is of another type; an ArgumentError is also a TypeError.
    ConfigError
        If ``comm`` is None and MPI sees another number of processes than the launcher has started.

    Examples
    --------
    >>> import mpizero as mz
    >>> with mz.comm.as_communicator("self") as comm:
    ...     comm.size
    1
    >>> mz.comm.as_communicator("all")
    Traceback (most recent call last):
    mpizero.errors.ArgumentError: comm must be an mpi4py communicator, ... got str: 'all'
    """
    if isinstance(comm, Communicator):
        return comm
    if comm is None:
        comm = default_world()
    if comm is None or comm == "self":
        return one_process(name)
    if type(comm).__module__.split(".")[0] == "mpi4py" or hasattr(comm, "Split_type"):
        from mpizero.comm.mpi import MpiCommunicator  # importing mpi4py starts MPI

        return MpiCommunicator(comm, name=name, timeout=timeout, guest=embedded)
    raise ArgumentError(
        'comm must be an mpi4py communicator, an mpizero Communicator, "self" (this process alone) or None (all ranks '
        f"of the launcher), got {type(comm).__name__}: {comm!r}"
    )


@contextmanager
def communicator_of(comm: Any = None) -> Iterator[Communicator]:
    """Convert ``comm`` to a Communicator for a ``with`` block, see :func:`as_communicator`.

    Collective over ``comm``. At the end of the block a new Communicator is closed; one that was passed as ``comm``
    stays open. In the block, errors must be raised on all ranks together, because closing is collective.
    """
    world = as_communicator(comm)
    try:
        yield world
    except (CollectiveError, PeerFailure):
        comm = world  # the other ranks may never close it
        raise
    finally:
        if world is not comm:
            world.close()


#: Packages whose versions are compared. HDF5 is part of the h5py package.
_PACKAGES = ("mpizero", "numpy", "mpi4py", "numba", "h5py", "threadpoolctl")

#: Held while the versions are read, so that ranks that are threads do not all read them.
_READING = Lock()


def versions() -> dict[str, str]:
    """Return the versions of Python, mpizero and the packages that it uses, by name.

    Not collective. The version of a package that is not installed is "missing"; for mpizero itself it is "from source".
    The result is cached, so the caller must not change it.
    """
    with _READING:
        return _read_versions()


@lru_cache(maxsize=1)
def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = installed_version(name) or ("from source" if name == "mpizero" else "missing")
    return versions


@lru_cache(maxsize=1)
def _software() -> dict[str, str]:
    facts = mpi_facts() if "mpi4py.MPI" in sys.modules else None
    mpi = {} if facts is None else {"MPI": f"{facts.vendor} {facts.version}", "MPI thread level": facts.thread_level}
    return {**versions(), "byte order": sys.byteorder, **mpi}


def agree_to_start(comm: Communicator, plans: Callable[[], Mapping[str, Any]]) -> None:
    """Raise on every rank if ranks run different software or have different settings.

    Collective over ``comm``: one message of 32 bytes a rank if all are equal. ``plans`` returns a mapping from names to
    settings, as :func:`mpizero.comm.agreement.agree_equal` takes it. ``mpizero train`` passes its configuration, and
    every sharded model passes all its settings. The command and the model call this function first, so that
    ranks with different settings raise before any work begins.

    Raises
    ------
    ConfigError
        If ranks differ; names the first version, setting or parameter that differs, and what it is on which ranks.
    """
    agree_equal(comm, lambda: {"the software": _software(), **plans()}, "agree to start")


#: Files of a control group by version: the limit, the memory in use, and the counters of memory that the kernel can
#: drop. In version 1 the counters that begin with "total" include the groups below.
_FILES = {
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
#: Slurm's variables for granted resources: MiB per node, MiB per processor, and processors on this node.
_GRANTED = ("SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE")
#: Limits of control groups of version 1 that are at least this large mean no limit.
_NONE = 1 << 60


def available_memory(proc: str = "/proc", environment: Mapping[str, str] = os.environ) -> int | None:
    """Return how many bytes of memory this process may still allocate; None if the system gives no limit.

    The result is the least of three numbers: the available memory of the node, what is left below the limits of this
    process's control groups and of all their parents (containers, ``--mem`` of Slurm), and what is left below the limit
    in Slurm's environment variables. The page cache does not count as used, because the kernel can drop it. Not
    collective.
    """
    limits = [*_of_node(Path(proc)), *_of_groups(Path(proc)), *_of_slurm(Path(proc), environment)]
    return max(0, min(limits)) if limits else None


def memory_of_node() -> int | None:
    """Return how many bytes the node has available, for all of its processes; None if unknown. Not collective."""
    return next(_of_node(Path("/proc")), None)


def _of_node(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _of_groups(proc: Path) -> Iterator[int]:
    """Yield the bytes left below the limit of each limited control group, from this process's group up to the root."""
    for version, top, path in _memory_groups(proc):
        limit_name, used_name, dropped = _FILES[version]
        for folder in [above for above in (top / path, *(top / path).parents) if above.is_relative_to(top)]:
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None and limit < _NONE:
                counters = dict(line.split() for line in _lines(folder / "memory.stat") if line.count(" ") == 1)
                yield limit - used + sum(int(counters.get(name, 0)) for name in dropped)


def _memory_groups(proc: Path) -> Iterator[tuple[int, Path, str]]:
    """Yield version, mount point and this process's path below it for each cgroup hierarchy that limits memory."""
    paths: dict[int, str] = {}
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in _lines(proc / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        version = 2 if kinds[0] == "cgroup2" else 1 if kinds[0] == "cgroup" and "memory" in kinds[2].split(",") else 0
        if version in paths:
            root, group_path = fields[3].rstrip("/"), paths[version]  # a container may see a part of the hierarchy only
            below = group_path.removeprefix(root) if group_path.startswith(root) else ""
            yield version, Path(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), fields[4])), below.strip("/")


def _of_slurm(proc: Path, environment: Mapping[str, str]) -> Iterator[int]:
    """Yield the bytes left of the job's Slurm memory on this node, as if its ranks there used equal amounts.

    Slurm may enforce this limit by polling alone, without a control group.
    """
    of_node, of_cpu, cpus = (integer_of(environment, name) or 0 for name in _GRANTED)
    granted = of_node or of_cpu * cpus
    fields = next(_lines(proc / "self" / "statm"), "").split()
    if granted and len(fields) > 1:
        tasks = re.match(r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        resident = int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
        yield (granted << 20) - resident * (int(tasks[0]) if tasks else 1)


def _number(path: Path) -> int | None:
    text = next(_lines(path), "")
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> Iterator[str]:
    try:
        yield from path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another system, or a file that this user may not read
        return
