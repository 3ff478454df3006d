"""Time the collectives that the library uses, and messages between two ranks, for several sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpizero._util.text import Measurement
from mpizero.comm import Communicator
from mpizero.layout import Partition
from mpizero.planning.machine_file import MessageSpeed

#: Bytes of the smallest message, and the factor from one size to the next.
_SMALLEST, _FACTOR = 8, 16
#: A collective is repeated until about ``_BYTES`` bytes have moved, at most ``_MOST`` times: a single short one could
#: not be timed.
_BYTES, _MOST = 1 << 21, 50


def sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes of the messages that are timed, in bytes: 8, 128, 2048 ... and ``largest``. Not collective."""
    found = [_SMALLEST]
    while found[-1] * _FACTOR < largest:
        found.append(found[-1] * _FACTOR)
    return (*found, largest) if largest > found[-1] else tuple(found)


@dataclass
class _Timed:
    """Time one collective, or message between two ranks, of one size.

    ``nbytes`` is the size of the message, ``sent`` the number of bytes that this rank sends in one call, and ``values``
    the seconds of a call, one entry for each repetition.
    """

    operation: str
    where: str
    nbytes: int
    sent: int
    call: Callable[[], object]
    values: list[float] = field(default_factory=list)

    def measure(self, comm: Communicator, *, keep: bool) -> None:
        """Repeat the call, and store the slowest rank's mean seconds per call if ``keep``. Collective."""
        times = max(1, min(_MOST, _BYTES // max(1, self.nbytes)))
        self.call()
        comm.barrier("bench")
        started = time.perf_counter()
        for _ in range(times):
            self.call()
        took = np.array([(time.perf_counter() - started) / times])
        comm.allreduce(took, "max", "bench")
        self.values.extend([float(took[0])] * keep)


class MessageBenchmark:
    """Time collectives and messages between two ranks over ``comm``; on a single rank there is nothing to time.

    Construction and :meth:`measure` are collective over ``comm``.
    """

    def __init__(self, comm: Communicator, largest: int) -> None:
        self.comm = comm
        with comm.split_node(name="bench") as node:
            leader = node.broadcast_object(comm.rank, tag="bench")
        self.leaders: list[int] = comm.allgather_object(leader, "bench")
        self.timed: Sequence[_Timed] = tuple(self._timed(largest)) if comm.size > 1 else ()

    def _timed(self, largest: int) -> Iterator[_Timed]:
        comm = self.comm
        yield _Timed("barrier", "all ranks", 0, 0, lambda: comm.barrier("bench"))
        pairs = {"inside a node": self._pair(same=True), "between nodes": self._pair(same=False)}
        for nbytes in sizes(largest):
            whole, other = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
            yield self._exchange(whole, other)
            yield self._gather(whole)
            # Sums of float64 have a type that every MPI adds.
            yield _Timed("allreduce", "all ranks", nbytes, *self._allreduce(np.ones(nbytes // 8)))
            for where, pair in pairs.items():
                if pair is not None:
                    yield _Timed("one to one", where, nbytes, nbytes, self._ping(pair, whole, other))

    def _exchange(self, send: np.ndarray, recv: np.ndarray) -> _Timed:
        """Return the timer of an all-to-all, as for sharded gradients: a rank gets its slice of every rank's vector."""
        comm, counts = self.comm, Partition(send.size, self.comm.size).sizes()
        own = counts[comm.rank]
        arrived = np.empty(own * comm.size, np.uint8) if own * comm.size > recv.size else recv[: own * comm.size]
        return _Timed(
            "exchange",
            "all ranks",
            send.size,
            send.size - own,
            lambda: comm.alltoallv(send, counts, arrived, [own] * comm.size, "bench"),
        )

    def _gather(self, whole: np.ndarray) -> _Timed:
        """Return the timer of an allgather, as for updated parameters: every rank gets the slices of all ranks."""
        comm, counts = self.comm, Partition(whole.size, self.comm.size).sizes()
        own, recv = np.ones(counts[comm.rank], np.uint8), np.empty_like(whole)
        sent = own.size * (comm.size - 1)
        return _Timed("gather", "all ranks", whole.size, sent, lambda: comm.allgatherv(own, recv, counts, "bench"))

    def _allreduce(self, vector: np.ndarray) -> tuple[int, Callable[[], object]]:
        comm = self.comm
        return 2 * vector.nbytes * (comm.size - 1) // comm.size, lambda: comm.allreduce(vector, "max", "bench")

    def _pair(self, *, same: bool) -> tuple[int, int] | None:
        """Return two ranks of one node if ``same``, else two ranks of different nodes; None if there are none."""
        ranks = range(self.comm.size)
        found = ((a, b) for a in ranks for b in ranks[a + 1 :] if (self.leaders[a] == self.leaders[b]) is same)
        return next(found, None)

    def _ping(self, pair: tuple[int, int], send: np.ndarray, recv: np.ndarray) -> Callable[[], object]:
        """Return a function that sends ``send`` to the second rank of ``pair``, and back in every second call."""
        comm, (first, second) = self.comm, pair
        turns = {"next": 0}

        def send_once() -> None:
            source, target = (first, second) if turns["next"] % 2 == 0 else (second, first)
            turns["next"] += 1
            if comm.rank == source:
                comm.send(send, target)
            elif comm.rank == target:
                comm.recv(recv, source)

        return send_once

    def measure(self, turn: int, *, keep: bool) -> None:
        """Time every message once, in reverse order if ``turn`` is -1; store the seconds if ``keep``. Collective."""
        for timed in self.timed[::turn]:
            timed.measure(self.comm, keep=keep)

    def figures(self) -> tuple[MessageSpeed, ...]:
        """Return the seconds of each operation and size, with the bytes that this rank sends. Not collective."""
        return tuple(MessageSpeed(t.operation, t.where, t.nbytes, t.sent, Measurement.of(t.values)) for t in self.timed)
