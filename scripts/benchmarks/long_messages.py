"""Send one message of 2.5 GiB of uint8 by each kind of call, and check every byte that arrives.

Start it on two ranks: ``mpiexec -n 2 python scripts/benchmarks/long_messages.py``. Each rank needs as much memory as
the message is long. ``--limit`` is the number of bytes of the pieces into which mpizero cuts messages. If it exceeds
the length, the message is sent in one piece, which shows whether the MPI library can send more than 2 GiB at once.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from mpi4py import MPI

from mpizero.comm.mpi import MESSAGE_LIMIT, MpiCommunicator
from mpizero.errors import MpizeroError
from mpizero.train.machine import described

PERIOD = 251


def pattern(size: int) -> np.ndarray:
    """Return ``size`` bytes whose period of 251 reveals a piece that arrives at a wrong position."""
    block = np.arange(PERIOD * 4096, dtype=np.uint32) % PERIOD
    return np.resize(block.astype(np.uint8), size)


def right(arrived: np.ndarray) -> bool:
    """Tell whether all bytes are those of :func:`pattern`; they are compared in pieces, to save memory."""
    step = PERIOD << 16
    cuts = range(0, arrived.size, step)
    return all(np.array_equal(arrived[i : i + step], pattern(min(step, arrived.size - i))) for i in cuts)


def message(comm: MpiCommunicator, size: int) -> np.ndarray | None:
    """Send ``size`` bytes from rank 0 to rank 1 by point-to-point; return them on rank 1, and None on the others."""
    if comm.rank == 0:
        comm.send(pattern(size), 1)
    elif comm.rank == 1:
        comm.recv(arrived := np.zeros(size, np.uint8), 0)
        return arrived
    return None


def broadcast(comm: MpiCommunicator, size: int) -> np.ndarray | None:
    """Broadcast a message of ``size`` bytes from rank 0 to all ranks, and return the received bytes."""
    buffer = pattern(size) if comm.rank == 0 else np.zeros(size, np.uint8)
    comm.broadcast(buffer)
    return buffer


def blocks(comm: MpiCommunicator, size: int) -> np.ndarray | None:
    """Send ``size`` bytes from rank 0 to rank 1 by an all-to-all whose other blocks are empty.

    Return the received bytes on rank 1, None on the others.
    """
    sent, taken = [0] * comm.size, [0] * comm.size
    if comm.rank == 0:
        sent[1] = size
    elif comm.rank == 1:
        taken[0] = size
    arrived = np.zeros(sum(taken), np.uint8)
    comm.alltoallv(pattern(sum(sent)), sent, arrived, taken)
    return arrived if comm.rank == 1 else None


PATHS = {path.__name__: path for path in (message, broadcast, blocks)}


def main() -> None:
    """Send a message once by every kind of call, and print the seconds and whether every byte arrived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=5 << 29, help="length of the message (default 2.5 GiB)")
    parser.add_argument("--limit", type=int, default=MESSAGE_LIMIT, help="length of a piece (default 1 GiB)")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="what to try (default all)")
    options = parser.parse_args()
    with MpiCommunicator(MPI.COMM_WORLD, limit=options.limit) as comm:
        if comm.size < 2:
            parser.error("start it on two ranks: mpiexec -n 2 python scripts/benchmarks/long_messages.py")
        if comm.rank == 0:
            print(f"{described()}: {options.bytes} bytes in pieces of {options.limit}", flush=True)
        for path in (PATHS[name] for name in options.paths):
            begun, failed = time.perf_counter(), ""
            try:
                arrived = path(comm, options.bytes)
                seconds = time.perf_counter() - begun
                failed = "" if arrived is None or right(arrived) else "arrived wrong"
            except MpizeroError as error:
                seconds, failed = time.perf_counter() - begun, str(error)
            arrived = None
            told = comm.allgather_object((failed, seconds))
            if comm.rank == 0:
                wrong = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text)
                print(
                    f"{path.__name__:10} {max(s for _, s in told):6.1f} s  {wrong or 'every byte is right'}", flush=True
                )


if __name__ == "__main__":
    main()
