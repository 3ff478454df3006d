"""Find out whether MPI can send from and receive into the memory of GPUs: ask MPI, and test it.

[Note: direct messages] A library that knows nothing of GPUs takes a GPU's address for one of the host, and the
process ends. So nothing is tried unless the library of every rank says that it knows them; what it says may still be
wrong, or not true of the transport between two nodes. So patterns are then sent between GPUs, short and long, from
rank to rank and by the collectives that layers use, and compared where they arrive.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from mpizero.comm.communicator import Communicator
from mpizero.comm.transport import Request
from mpizero.errors import ConfigError, MpizeroError
from mpizero.kernels import to_host
from mpizero.kernels.device import simulated
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.kernels.device import Device

#: Bytes of the patterns: one that travels with its envelope, and one that a library sends in pieces of its own.
PATTERNS = (64, 1 << 22)
#: Seconds after which a pattern is taken for lost.
PATIENCE = 60.0
#: The most that two equal neighbours of a pattern are apart: a prime, so that no piece looks like another.
_PERIOD = 251
_TAG = 31_500
#: Sends a pattern of so many bytes, and says what is wrong with what arrives.
Send = Callable[[Communicator, "Device", int], str]
#: Where Linux says what a process has loaded.
_LOADED = "/proc/self/maps"


def prove(comm: Communicator, open_device: Callable[[], Device]) -> str:
    """Find out whether arrays of GPUs may be given to MPI; return why not, the same on every rank, or nothing.

    Collective over ``comm``. ``open_device`` returns this rank's; it is called where MPI claims to know GPUs.

    Raises
    ------
    ConfigError
        If a pattern never arrives: what has begun cannot be taken back.
    """
    reason = _agreed(comm, unclaimed(comm))
    if reason:
        return reason
    device = open_device()
    comm.wait_for_device = device.synchronize
    try:
        return _agreed(comm, _tried(comm, device, _around)) or _agreed(comm, _tried(comm, device, _among_all))
    finally:
        comm.wait_for_device = None


def unclaimed(comm: Communicator) -> str:
    """Return why this MPI cannot take GPU memory, by what it says; empty if it claims that it can. Not collective."""
    if getattr(comm, "mpi", None) is None:  # its class is not imported here: that would start MPI, also for a plan
        return "these ranks are threads of one process"
    if comm.size == 1:
        return "there is one rank"
    if simulated():
        return ""  # their memory is the host's
    return "" if _claims() else "this MPI does not say that it takes memory of CUDA devices"


def _claims() -> bool:
    """Ask the library, by the function that MPICH, Open MPI and their kin have for it."""
    try:
        with open(_LOADED, encoding="utf-8") as maps:
            loaded = sorted({line.split()[-1] for line in maps if "/libmpi" in line})
    except OSError:
        return False
    for path in loaded:
        try:
            query = ctypes.CDLL(path).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.restype, query.argtypes = ctypes.c_int, ()
        return bool(query())
    return False


def _agreed(comm: Communicator, reason: str) -> str:
    """Return the first rank's reason that there is. Collective."""
    return next((given for given in comm.allgather_object(reason, "direct messages") if given), "")


def _tried(comm: Communicator, device: Device, send: Send) -> str:
    try:
        return next((wrong for size in PATTERNS if (wrong := send(comm, device, size))), "")
    except ConfigError:
        raise
    except (MpizeroError, TypeError, ValueError, BufferError) as error:  # the others go on, to the agreement
        return f"rank {comm.rank}: {type(error).__name__}: {' '.join(str(error).split())}"


def _around(comm: Communicator, device: Device, size: int) -> str:
    """Send a pattern to the next rank; say what is wrong with the one that arrives."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = device.put(np.zeros(size, np.uint8))
    requests = [comm.irecv(arrived, before, _TAG), comm.isend(device.put(_pattern(comm.rank, size)), after, _TAG)]
    _wait(requests)
    return _compared(arrived, [before], size, comm.rank)


def _among_all(comm: Communicator, device: Device, size: int) -> str:
    """Send patterns by an exchange of blocks and by a gather; say what is wrong with what arrives."""
    ranks, part = comm.size, max(1, size // comm.size)
    blocks, gathered = (device.put(np.zeros(ranks * part, np.uint8)) for _ in range(2))
    own = _pattern(comm.rank, part)
    comm.alltoallv(device.put(np.tile(own, ranks)), [part] * ranks, blocks, [part] * ranks, "direct messages")
    comm.allgatherv(device.put(own), gathered, [part] * ranks, "direct messages")
    wrong = (_compared(arrived, range(ranks), part, comm.rank) for arrived in (blocks, gathered))
    return next(filter(None, wrong), "")


def _wait(requests: list[Request]) -> None:
    limit = time.monotonic() + PATIENCE
    while not all([request.test() for request in requests]):
        if time.monotonic() > limit:
            raise ConfigError(
                f"a message from one GPU to another has not arrived for {PATIENCE:.0f} s, though this MPI says that "
                "it takes memory of GPUs: train with direct_messages = false, which sends from memory of the host"
            )


def _pattern(rank: int, size: int) -> Array:
    return ((np.arange(size) + 7 * rank) % _PERIOD + 1).astype(np.uint8)


def _compared(arrived: Array, senders: range | list[int], size: int, rank: int) -> str:
    wanted = np.concatenate([_pattern(sender, size) for sender in senders])
    if np.array_equal(to_host(arrived), wanted):
        return ""
    return f"a pattern sent between GPUs arrived wrong on rank {rank}, though this MPI says that it takes their memory"
