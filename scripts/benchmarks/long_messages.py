"""Send one message of 2.5 GiB of uint8 by each kind of call, and check every byte that arrives.

Start it on two ranks: ``mpiexec -n 2 python scripts/benchmarks/long_messages.py``. Rank 1 needs twice as much memory
as the message is long. ``--limit`` is the number of bytes of the pieces into which mpizero cuts messages. If it exceeds
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

#: A prime, so that bytes which repeat after so many reveal a piece that arrives at a wrong position.
PERIOD = 251
#: Bytes that are compared at once, to save memory.
PIECE = 1 << 26


def arrived(kind: str, comm: MpiCommunicator, sent: np.ndarray) -> np.ndarray:
    """Send the bytes from rank 0 to rank 1 by a kind of call; return what this rank has then."""
    taken = sent if comm.rank == 0 else np.zeros_like(sent)
    if kind == "broadcast":
        comm.broadcast(taken)
    elif kind == "alltoallv":  # with blocks that are empty but for this one
        counts = ([0, sent.size], [0, 0]) if comm.rank == 0 else ([0, 0], [sent.size, 0])
        comm.alltoallv(sent[: sum(counts[0])], counts[0], taken[: sum(counts[1])], counts[1])
    elif comm.rank == 0:
        comm.send(sent, 1)
    elif comm.rank == 1:
        comm.recv(taken, 0)
    return taken


def main() -> None:
    """Send a message once by every kind of call, and print the seconds and whether every byte arrived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=5 << 29, help="length of the message (default 2.5 GiB)")
    parser.add_argument("--limit", type=int, default=MESSAGE_LIMIT, help="length of a piece (default 1 GiB)")
    options = parser.parse_args()
    with MpiCommunicator(MPI.COMM_WORLD, limit=options.limit) as comm:
        if comm.size != 2:
            parser.error("start it on two ranks: mpiexec -n 2 python scripts/benchmarks/long_messages.py")
        if comm.rank == 0:
            print(f"{described()}: {options.bytes} bytes in pieces of {options.limit}", flush=True)
        sent = np.resize(np.arange(PERIOD, dtype=np.uint8), options.bytes)
        for kind in ("send", "broadcast", "alltoallv"):
            begun = time.perf_counter()
            try:
                found = arrived(kind, comm, sent)
                seconds = time.perf_counter() - begun
                cuts = [slice(i, i + PIECE) for i in range(0, sent.size, PIECE)]
                failed = "" if all(np.array_equal(found[cut], sent[cut]) for cut in cuts) else "arrived wrong"
                del found
            except MpizeroError as error:
                seconds, failed = time.perf_counter() - begun, str(error)
            told = comm.allgather_object((failed, seconds))
            wrong = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in enumerate(told) if text)
            if comm.rank == 0:
                print(f"{kind:10} {max(s for _, s in told):6.1f} s  {wrong or 'every byte is right'}", flush=True)


if __name__ == "__main__":
    main()
