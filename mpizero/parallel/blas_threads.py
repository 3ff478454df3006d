"""Set the threads of BLAS, and compare its builds over the ranks: both decide bits."""

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
    """Limit BLAS to ``threads`` threads, and say so on rank 0 if ranks have different builds of it.

    Collective over ``comm``. Products of another build or for another core type may have other bits, so the result of
    a training would depend on where its grains were computed.

    Returns
    -------
    object
        With ``restore_original_limits()``.

    Raises
    ------
    ConfigError
        ``MPIZERO_BLAS`` names a library that a rank cannot use; RemoteError on the others.
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
    """Name the BLAS builds that NumPy uses, of all ``libraries`` in this process. Not collective.

    Other packages (SciPy) bring their own copy, and which rank has loaded them is chance: where NumPy has one of its
    own, the others do not count.
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
