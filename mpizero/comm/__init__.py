"""Wrap mpi4py: communicators, process grids, shared memory, sums in a fixed order, agreement on errors, watchdog.

No other package of the library imports mpi4py, except :mod:`mpizero.testing`.
"""

from mpizero.comm.communicator import CallTrace, Communicator, Counters, Request, SharedMemory
from mpizero.comm.grid import ProcessGrid
from mpizero.comm.group.model_group import CommunicatorGroup
from mpizero.comm.inmemory import InMemoryCommunicator
from mpizero.comm.startup.convert import as_communicator

__all__ = [
    "CallTrace",
    "Communicator",
    "CommunicatorGroup",
    "Counters",
    "InMemoryCommunicator",
    "ProcessGrid",
    "Request",
    "SharedMemory",
    "as_communicator",
]
