"""Set the number of BLAS threads, and warn if ranks use different builds of BLAS: results depend on both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from mpizero.comm import Communicator
from mpizero.comm.agreement import all_ranks
from mpizero.kernels.blas import library
from mpizero.text import notice


def limit_blas_threads(comm: Communicator, threads: int) -> Any:
    """Limit BLAS to ``threads`` threads, and print a warning on rank 0 if ranks have different builds of BLAS.

    Collective over ``comm``. Another build of BLAS, or one for another type of CPU core, may round matrix products
    differently. The result of a training would then depend on which rank computes which grain.

    Returns
    -------
    object
        Its method ``restore_original_limits()`` sets the numbers of threads from before the call.

    Raises
    ------
    ConfigError
        If ``MPIZERO_BLAS`` names a library that this rank cannot use; the other ranks raise ``RemoteError``.
    """
    with all_ranks(comm, "BLAS"):
        beside = library()
    controller = ThreadpoolController()
    builds = numpy_builds(controller.info()) + ([] if beside is None else [beside.name])
    message = different_builds(comm.allgather_object(builds, "BLAS builds"))
    if message is not None and comm.rank == 0:
        notice(message)
    return controller.limit(limits=threads, user_api="blas")


def numpy_builds(libraries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the BLAS builds that NumPy uses, out of all ``libraries`` in this process. Not collective.

    Other packages, SciPy for one, bring their own copy of BLAS, and not every rank may have loaded them. Where NumPy
    has a BLAS of its own, only that one is named.
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
    """Describe how the ranks' BLAS builds differ; None where they are the same. Not collective."""
    if all(list(build) == list(builds[0]) for build in builds):
        return None
    rank = next(r for r, build in enumerate(builds) if list(build) != list(builds[0]))
    return (
        f"rank {rank} has BLAS {', '.join(builds[rank]) or 'none'}, rank 0 has {', '.join(builds[0]) or 'none'}: "
        "results may differ in their last bits between runs that assign grains differently; use nodes of one kind"
    )
