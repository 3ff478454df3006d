"""Check, before a training starts, that all ranks have the same software and the same settings."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from threading import Lock
from typing import Any

from mpizero._util.text import installed_version
from mpizero.comm.communicator import Communicator
from mpizero.comm.equality import agree_equal
from mpizero.comm.startup.launch import mpi_facts

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
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        found[name] = installed_version(name) or ("from source" if name == "mpizero" else "missing")
    return found


@lru_cache(maxsize=1)
def _software() -> dict[str, str]:
    facts = mpi_facts() if "mpi4py.MPI" in sys.modules else None
    mpi = {} if facts is None else {"MPI": f"{facts.vendor} {facts.version}", "MPI thread level": facts.thread_level}
    return {**versions(), "byte order": sys.byteorder, **mpi}


def agree_to_start(comm: Communicator, plans: Callable[[], Mapping[str, Any]]) -> None:
    """Raise on every rank if ranks run different software or have different settings.

    Collective over ``comm``: one message of 32 bytes a rank if all are equal. ``plans`` returns a mapping from names to
    settings, as :func:`mpizero.comm.equality.agree_equal` takes it. ``mpizero train`` passes its configuration, and
    every sharded model passes all its settings. Both make this call first, so ranks with different settings raise
    before they begin.

    Raises
    ------
    ConfigError
        If ranks differ; names the first version, setting or parameter that differs, its values and their ranks.
    """
    agree_equal(comm, lambda: {"the software": _software(), **plans()}, "agree to start")
