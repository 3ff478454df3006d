"""Wrap mpi4py: communicators, process grids, shared memory, sums in a fixed order, agreement on errors, watchdog.

No other package of the library imports mpi4py, except :mod:`mpizero.testing`.
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.comm.communicator import Communicator as Communicator
    from mpizero.comm.communicator import Counters as Counters
    from mpizero.comm.communicator import Request as Request
    from mpizero.comm.communicator import SharedMemory as SharedMemory
    from mpizero.comm.grid import ProcessGrid as ProcessGrid
    from mpizero.comm.inmemory import InMemoryCommunicator as InMemoryCommunicator
    from mpizero.comm.startup.convert import as_communicator as as_communicator
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
