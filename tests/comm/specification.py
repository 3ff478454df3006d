"""Specifications of a communicator: what every call brings, by NumPy, and tests that hold on every kind of ranks."""

from __future__ import annotations

from functools import reduce, wraps
from itertools import accumulate

import numpy as np

from mpizero.comm.model_group import CommunicatorGroup
from mpizero.layout import Span


def on_ranks(specification=None, *, limit=24):
    """Make a test of a function of a communicator; over MPI messages are cut after ``limit`` bytes, too."""
    if specification is None:
        return lambda given: on_ranks(given, limit=limit)

    def test(ranks):
        ranks(specification)

    test.__name__, test.__doc__, test.limit = specification.__name__, specification.__doc__, limit
    return test


def on_groups(specification=None, *, limit=24):
    """Make a test of a function of a group, once for each path of its arrays."""
    if specification is None:
        return lambda given: on_groups(given, limit=limit)

    @wraps(specification)
    def work(comm):
        with comm.split_node() as node:
            for path, shared in (("messages", None), ("a window", node)):
                group = CommunicatorGroup(comm, shared)
                try:
                    specification(group)
                except Exception as error:
                    error.add_note(f"the group's arrays go through {path}")
                    raise
                group.close()
                group.close()

    return on_ranks(work, limit=limit)


def data(rank, length, dtype=np.float32):
    """What a rank gives; everybody can compute it, and sums of it are exact."""
    return ((np.arange(length) + 7 * rank) % 50).astype(dtype)


def uneven(size, length):
    """Lengths of the blocks of ranks, of which some are long, some empty, some short."""
    return [(length, 0, 5)[rank % 3] for rank in range(size)]


def everything(comm, length, dtype=np.float32):
    """Call every operation, blocking and not, all of the latter on their way at once; return what they bring."""
    rank, size = comm.rank, comm.size
    counts, found = uneven(size, length), {}
    sent = [counts[(rank + r) % size] for r in range(size)]
    starts = accumulate(counts, initial=3)
    spans = [Span(start, start + n) for start, n in zip(starts, counts, strict=False)]

    def out(name, value):
        found[name] = np.full(value, -1, dtype) if isinstance(value, int) else value
        return found[name]

    for prefix in ("", "i"):
        waiting = []

        def call(operation, *arguments, prefix=prefix, waiting=waiting):
            waiting.append(getattr(comm, prefix + operation)(*arguments))

        for root in range(size):
            call("broadcast", out(f"{prefix}broadcast {root}", data(rank, length, dtype)), root)
        for op in ("sum", "max", "min"):
            call("allreduce", out(f"{prefix}{op}", data(rank, length, dtype)), op)
        call("allgather", data(rank, length, dtype), out(f"{prefix}allgather", size * length))
        call("alltoallv", data(rank, sum(sent), dtype), sent, out(f"{prefix}alltoallv", sum(sent)), sent)
        call("barrier")
        if prefix:
            waiting.append(comm.igather_spans(data(rank, counts[rank], dtype), out("places", sum(counts) + 6), spans))
            waiting.append(comm.irecv(out("message", length), (rank - 1) % size, 7))
            comm.send(given := data(rank, length, dtype), (rank + 1) % size, 7)
            given[...] = 99
        for request in reversed(waiting) if prefix else ():
            request.wait()
            request.wait()
    comm.allgatherv(data(rank, counts[rank], dtype), out("allgatherv", sum(counts)), counts)
    comm.reduce_scatter(data(rank, sum(counts), dtype), out("reduce_scatter", counts[rank]), counts)
    found["objects"] = np.array([len(o) for o in comm.allgather_object("x" * (length * (rank + 1)))])
    found["told"] = np.array(len(comm.broadcast_object(b"y" * 5 * length if rank == 0 else None)))
    return found


def expected(rank, size, length, dtype=np.float32):
    """What :func:`everything` must bring to a rank."""
    counts = uneven(size, length)
    starts = [0, *accumulate(counts)]
    whole = [data(r, length, dtype) for r in range(size)]
    gathered = np.concatenate([data(r, counts[r], dtype) for r in range(size)])
    turned = []
    for r in range(size):
        sent = [counts[(r + p) % size] for p in range(size)]
        start = sum(sent[:rank])
        turned.append(data(r, sum(sent), dtype)[start : start + sent[rank]])
    both = {
        **{f"broadcast {root}": whole[root] for root in range(size)},
        **{op: reduce(ufunc, whole) for op, ufunc in (("sum", np.add), ("max", np.maximum), ("min", np.minimum))},
        "allgather": np.concatenate(whole),
        "alltoallv": np.concatenate(turned),
    }
    total = sum(data(r, sum(counts), dtype) for r in range(size))
    return {
        **both,
        **{f"i{name}": value for name, value in both.items()},
        "allgatherv": gathered,
        "places": np.concatenate([np.full(3, -1, dtype), gathered, np.full(3, -1, dtype)]),
        "message": whole[(rank - 1) % size],
        "reduce_scatter": total[starts[rank] : starts[rank + 1]],
        "objects": length * np.arange(1, size + 1),
        "told": np.array(5 * length),
    }


def check_everything(comm, length, dtype=np.float32):
    found, right = everything(comm, length, dtype), expected(comm.rank, comm.size, length, dtype)
    assert found.keys() == right.keys()
    wrong = [name for name, value in found.items() if not np.array_equal(value, right[name])]
    assert not wrong, (length, dtype, wrong)


def counted(comm):
    """What a communicator has counted and traced so far."""
    names = ("bytes_sent", "messages", "bytes_by_tag", "messages_by_tag")
    return comm.trace.started, *(getattr(comm.counters, name) for name in names)
