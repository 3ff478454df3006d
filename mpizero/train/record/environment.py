"""Describe where a run trains: versions of libraries, and the machine."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

from mpizero.checkpoint.format import hdf5_version
from mpizero.comm.startup import mpi_facts, versions
from mpizero.errors import ConfigError
from mpizero.train.doctor.machine_facts import blas, cores, processor


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Return the versions of Python, mpizero and the libraries that it uses, by name. Not collective.

    The result is cached, so the caller must not change it.
    """
    mpi = mpi_facts() if "mpi4py.MPI" in sys.modules else None
    try:
        product = blas()
    except ConfigError as error:
        product = str(error)
    return {
        **versions(),
        "mpi": "none" if mpi is None else f"{mpi.vendor} {mpi.version}",
        "hdf5": hdf5_version(),
        "blas": product,
    }


def machine(threads: int, device: str, job: str) -> dict[str, Any]:
    """Return this process's processor and its number of cores, beside what is given. Not collective."""
    return {"processor": processor(), "cores": len(cores()), "threads": threads, "device": device, "job": job}
