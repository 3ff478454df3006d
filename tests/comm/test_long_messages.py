"""What is longer than a message travels in pieces, on every path; it counts as the one call that the user made."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.comm.specification import check_everything, counted

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


def test_no_piece_is_longer_than_the_limit_and_all_count_as_the_call_they_belong_to(pair):
    cut, whole = pair
    for asleep in (False, True):
        for comm in pair:
            comm._waiting = type(comm._waiting)(1 + asleep)
            check_everything(comm, LONG)
    longest = cut._comm.longest
    if cut.size > 1:
        assert longest.keys() >= {"Bcast", "Ibcast", "Isend", "Irecv", "Ialltoallw", "Allreduce", "Iallreduce"}
    assert {name: size for name, size in longest.items() if size > LIMIT} == {}
    assert (cut.trace.number, *counted(cut)) == (whole.trace.number, *counted(whole))


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
