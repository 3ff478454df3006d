"""Find out whether MPI can send from and receive into GPU memory ("CUDA-aware"): ask MPI, then test it.

[Note: direct messages] An MPI library without GPU support treats a GPU address as a host address, and the process
crashes. So GPU arrays are passed to MPI only if the library of every rank claims to support them. The claim may still
be wrong, or may not hold for the network between two nodes. So test patterns, short and long, are then sent between
GPUs, from rank to rank and by the collectives that layers use, and are compared on arrival.
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
from mpizero.kernels.device import gpus
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.kernels.device import Device

#: Bytes of the patterns: one that MPI sends at once (eager), and one so long that it uses its protocol for large data.
PATTERNS = (64, 1 << 22)
#: Seconds after which a pattern that has not arrived counts as lost.
PATIENCE = 60.0
#: Length after which a pattern repeats: a prime, so that pieces of a message that are swapped are noticed.
_PERIOD = 251
_TAG = 31_500
#: Function that sends a pattern of so many bytes, and returns what is wrong with the received ones, or "".
Send = Callable[[Communicator, "Device", int], str]
#: File in which Linux lists the libraries that this process has loaded.
_LOADED = "/proc/self/maps"


def prove(comm: Communicator, open_device: Callable[[], Device]) -> str:
    """Test whether GPU arrays may be passed to MPI; return "" if so, else the reason, the same on all ranks.

    Collective over ``comm``. ``open_device`` returns this rank's GPU; it is called only if MPI claims GPU support.

    Raises
    ------
    ConfigError
        If a pattern never arrives: its message cannot be cancelled, so the job cannot go on.
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
    """Return a reason, known without a test, not to pass GPU arrays to MPI; "" if there is none. Not collective.

    Reasons are ranks that are threads, a communicator of one rank, and an MPI library that does not claim to support
    GPU memory.
    """
    if getattr(comm, "mpi", None) is None:  # its class is not imported here: that would start MPI, also for a plan
        return "these ranks are threads of one process"
    if comm.size == 1:
        return "there is one rank"
    if gpus().in_host_memory:
        return ""
    return "" if _claims() else "this MPI does not say that it takes memory of CUDA devices"


def _claims() -> bool:
    """Tell whether the loaded MPI library claims to support CUDA memory, by its ``MPIX_Query_cuda_support``.

    MPICH, Open MPI and MPI libraries derived from them have this function. False if the library does not have it.
    """
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
    """Return the reason of the lowest rank that has one, or "", on all ranks. Collective."""
    return next((given for given in comm.allgather_object(reason, "direct messages") if given), "")


def _tried(comm: Communicator, device: Device, send: Send) -> str:
    try:
        return next((wrong for size in PATTERNS if (wrong := send(comm, device, size))), "")
    except ConfigError:
        raise
    except (MpizeroError, TypeError, ValueError, BufferError) as error:  # the others go on, to the agreement
        return f"rank {comm.rank}: {type(error).__name__}: {' '.join(str(error).split())}"


def _around(comm: Communicator, device: Device, size: int) -> str:
    """Send a pattern of ``size`` bytes to the next rank; return what is wrong with the received one, or ""."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    arrived = device.put(np.zeros(size, np.uint8))
    requests = [comm.irecv(arrived, before, _TAG), comm.isend(device.put(_pattern(comm.rank, size)), after, _TAG)]
    _wait(requests)
    return _compared(arrived, [before], size, comm.rank)


def _among_all(comm: Communicator, device: Device, size: int) -> str:
    """Send patterns of ``size`` bytes in all by an all-to-all and an all-gather; return what arrived wrong, or ""."""
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
