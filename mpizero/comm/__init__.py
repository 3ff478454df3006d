"""Wrap mpi4py: communicators, process grids, shared memory, sums in a fixed order, agreement on errors, watchdog.

Of the other packages only ``mpizero.guard`` and :mod:`mpizero.testing` import mpi4py.
"""

from typing import TYPE_CHECKING

from mpizero._util.names import lazy_names

if TYPE_CHECKING:
    from mpizero.comm.communicator import Communicator as Communicator
    from mpizero.comm.communicator import Counters as Counters
    from mpizero.comm.communicator import Request as Request
    from mpizero.comm.communicator import SharedMemory as SharedMemory
    from mpizero.comm.mesh import ProcessGrid as ProcessGrid
    from mpizero.comm.startup import as_communicator as as_communicator
    from mpizero.comm.threads import InMemoryCommunicator as InMemoryCommunicator
else:  # a checker of types would take any name for known
    __getattr__, __dir__, __all__ = lazy_names(__name__)
