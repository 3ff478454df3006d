"""Set the number of BLAS threads, and warn if ranks use different builds of BLAS; either may change rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpizero._util.text import notice
from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.guard.guard import ProcessSetting
from mpizero.kernels.matmul import library


class _BlasThreads:
    """Set the number of threads of every BLAS of this process, and remember those from before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[Any, int]] = {}

    def set(self, threads: int) -> None:
        """Set the number of threads of all libraries that are loaded now."""
        for one in ThreadpoolController().select(user_api="blas").lib_controllers:
            self._before.setdefault(one.filepath, (one, one.num_threads))
            one.set_num_threads(threads)

    def restore(self) -> None:
        """Set the numbers of threads from before the first :meth:`set`."""
        for one, threads in self._before.values():
            one.set_num_threads(threads)
        self._before.clear()


@functools.cache
def _of_process() -> ProcessSetting[int]:
    setting = _BlasThreads()
    return ProcessSetting(setting.set, setting.restore)


def limit_blas_threads(comm: Communicator, threads: int) -> Callable[[], None]:
    """Limit BLAS to ``threads`` threads, and print a warning on rank 0 if ranks have different builds of BLAS.

    Collective over ``comm``. Another build of BLAS, or one for another type of CPU core, may round matrix products
    differently. The result of a training would then depend on which rank computes which grain.

    Returns
    -------
    callable
        Ends the limit. BLAS then has the threads of the newest limit that has not ended, or those from before all.

    Raises
    ------
    ConfigError
        If the environment variable ``MPIZERO_BLAS`` names a library that this rank cannot use. The other ranks raise
        ``RemoteError``.
    """
    with all_ranks(comm, "BLAS"):
        beside = library()
    builds = numpy_builds(ThreadpoolController().info()) + ([] if beside is None else [beside.name])
    message = different_builds(comm.allgather_object(builds, "BLAS builds"))
    if message is not None and comm.rank == 0:
        notice(message)
    return _of_process().hold(threads)


def numpy_builds(libraries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe the BLAS builds that NumPy uses: library, version and type of CPU core of each. Not collective.

    ``libraries`` are all libraries that this process has loaded, as ``ThreadpoolController.info()`` returns them. Some
    may be copies of BLAS that belong to other packages such as SciPy. So if NumPy was installed with its own BLAS, only
    that one is returned; otherwise every BLAS in ``libraries`` is.
    """
    found = [library for library in libraries if library["user_api"] == "blas"]
    home = Path(np.__file__).parent
    folders = (home, home.with_name("numpy.libs"))
    own = [library for library in found if any(Path(library["filepath"]).is_relative_to(f) for f in folders)]
    return sorted(
        f"{library['internal_api']} {library['version']} for {library.get('architecture', 'unknown cores')}"
        for library in own or found
    )


def different_builds(builds: Sequence[Sequence[str]]) -> str | None:
    """Return a warning that compares rank 0 with the first rank that differs; None if no rank does. Not collective.

    ``builds[r]`` are the BLAS builds of rank r, as :func:`numpy_builds` describes them.
    """
    if all(list(build) == list(builds[0]) for build in builds):
        return None
    rank = next(r for r, build in enumerate(builds) if list(build) != list(builds[0]))
    return (
        f"rank {rank} has BLAS {', '.join(builds[rank]) or 'none'}, rank 0 has {', '.join(builds[0]) or 'none'}: "
        "results may differ in their last bits between runs that assign grains differently; use nodes of one kind"
    )
