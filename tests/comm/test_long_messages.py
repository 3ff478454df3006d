"""What is longer than a message travels in pieces, on every path; it counts as the one call that the user made."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from mpizero.layout import Span

pytestmark = pytest.mark.mpi
LIMIT = 1000
#: Elements of four bytes in several pieces, the last one short.
LONG = 3 * LIMIT // 4 + 7


class Measured:
    """An mpi4py communicator that notes the longest message that each of its operations is given."""

    def __init__(self, comm):
        self._comm = comm
        self.longest = {}

    def __getattr__(self, name):
        inner = getattr(self._comm, name)
        if not callable(inner):
            return inner

        def measured(*arguments):
            sizes = [self._bytes(spec) for spec in arguments if isinstance(spec, list)]
            self.longest[name] = max([self.longest.get(name, 0), *sizes])
            return inner(*arguments)

        return measured

    @staticmethod
    def _bytes(spec):
        _, count, *_, types = spec
        if isinstance(types, list):  # of Alltoallw: one a peer
            return max(n * kind.Get_size() for n, kind in zip(count[0], types, strict=True))
        return (max(count) if isinstance(count, (list, tuple)) else count) * types.Get_size()


@pytest.fixture
def pair(world):
    """Return a communicator of short messages, noted, and one that cuts nothing here."""
    from mpi4py import MPI

    from mpizero.comm.mpi import MpiCommunicator

    cut = MpiCommunicator(MPI.COMM_WORLD, limit=LIMIT, name="cut")
    with cut, MpiCommunicator(MPI.COMM_WORLD, name="whole") as whole:
        inner, cut._comm = cut._comm, Measured(cut._comm)
        yield cut, whole
        cut._comm = inner


def everything(comm):
    """Return what every operation gives, on blocks of which some are empty, some short, some long."""
    rank, size = comm.rank, comm.size
    counts = [(LONG, 0, 5)[r % 3] for r in range(size)]
    own = np.arange(counts[rank], dtype=np.float32) + 1000 * rank
    equal = np.arange(LONG, dtype=np.float32) + rank
    sent = [counts[(rank + r) % size] for r in range(size)]
    blocks = np.arange(sum(sent), dtype=np.float32) + 10_000 * rank
    starts = list(accumulate(counts, initial=3))
    spans = [Span(start, start + n) for start, n in zip(starts, counts, strict=False)]
    outs = []

    def out(n):
        outs.append(np.full(n, -1, np.float32))
        return outs[-1]

    comm.broadcast(value := equal.copy(), size - 1)
    comm.ibroadcast(other := equal.copy(), 0).wait()
    comm.allgather(equal, out(size * LONG))
    comm.iallgather(equal, out(size * LONG)).wait()
    comm.allgatherv(own, out(sum(counts)), counts)
    comm.iallgatherv(own, out(sum(counts)), counts).wait()
    comm.igather_spans(own, out(sum(counts) + 6), spans).wait()
    comm.alltoallv(blocks, sent, out(sum(sent)), sent)
    comm.ialltoallv(blocks, sent, out(sum(sent)), sent).wait()
    comm.reduce_scatter(np.tile(equal, size), out(LONG), [LONG] * size)
    comm.allreduce(total := equal.copy(), "max")
    comm.iallreduce(least := equal.copy(), "min").wait()
    request = comm.irecv(out(LONG), (rank - 1) % size, 7)
    comm.send(equal, (rank + 1) % size, 7)
    request.wait()
    objects = comm.allgather_object("x" * (LONG * (rank + 1)))
    told = comm.broadcast_object(b"y" * 5 * LONG if rank == 0 else None)
    return [value, other, *outs, total, least], (objects, told)


@pytest.mark.parametrize("asleep", [False, True])
def test_pieces_bring_what_whole_messages_bring_and_sleep_what_polling_brings(pair, asleep):
    cut, whole = pair
    cut._waiting, whole._waiting = type(cut._waiting)(1 + asleep), type(cut._waiting)(2 - asleep)
    for (arrays, objects), (expected, others) in [tuple(map(everything, pair))]:
        for array, wanted in zip(arrays, expected, strict=True):
            assert_array_equal(array, wanted)
        assert objects == others


def test_no_operation_gives_mpi_a_longer_message_than_the_limit(pair):
    cut, _ = pair
    for asleep in (False, True):
        cut._waiting = type(cut._waiting)(1 + asleep)
        everything(cut)
    long = {name: size for name, size in cut._comm.longest.items() if size > LIMIT}
    if cut.size > 1:
        assert set(cut._comm.longest) >= {"Bcast", "Ibcast", "Isend", "Irecv", "Ialltoallw", "Allreduce", "Iallreduce"}
    assert long == {}


def test_pieces_count_as_the_call_they_belong_to(pair):
    for comm in pair:
        everything(comm)
    cut, whole = pair
    assert cut.trace.started == whole.trace.started
    assert cut.trace.number == whole.trace.number
    assert (cut.counters.bytes_sent, cut.counters.messages) == (whole.counters.bytes_sent, whole.counters.messages)
    assert cut.counters.bytes_by_tag == whole.counters.bytes_by_tag


def test_exchanges_that_are_on_their_way_together_do_not_mix_their_pieces(pair):
    cut, _ = pair
    size = cut.size
    given = [np.arange(size * LONG, dtype=np.float32) + 1e5 * (turn + 10 * cut.rank) for turn in range(3)]
    taken = [np.empty(size * LONG, np.float32) for _ in given]
    counts = [LONG] * size
    requests = [cut.ialltoallv(x, counts, y, counts) for x, y in zip(given, taken, strict=True)]
    for request in reversed(requests):
        request.wait()
    for turn, y in enumerate(taken):
        blocks = [np.arange(cut.rank * LONG, (cut.rank + 1) * LONG) + 1e5 * (turn + 10 * r) for r in range(size)]
        assert_array_equal(y, np.concatenate(blocks).astype(np.float32))
