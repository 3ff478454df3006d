"""Wrap mpi4py: communicators, process grids, shared memory, sums in a fixed order, agreement on errors, watchdog.

No other package of the library imports mpi4py, except :mod:`mpizero.testing`.
"""

from mpizero.comm.communicator import Communicator, Counters, Request, SharedMemory
from mpizero.comm.grid import ProcessGrid
from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.comm.startup.convert import as_communicator

__all__ = [
    "Communicator",
    "Counters",
    "InMemoryCommunicator",
    "ProcessGrid",
    "Request",
    "SharedMemory",
    "as_communicator",
]
