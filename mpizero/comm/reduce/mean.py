"""Average an array over ranks, with the same bits on every number of nodes."""

from __future__ import annotations

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.reduce.exact import ExactExchange, RowsToSum, gather_spans
from mpizero.comm.reduce.segments import program_array, tree_sum
from mpizero.layout import Partition, Span, rows_plan
from mpizero.types import Array


def mean_over_ranks(comm: Communicator, values: Array) -> Array:
    """Return the mean of a 1-D array over the ranks, added by the binary tree over ranks. Collective over ``comm``."""
    size = comm.size
    plan = rows_plan([range(rank, rank + 1) for rank in range(size)], [1] * size, size)
    spans = [Span(s.start, s.stop) for s in Partition(values.size, size)]
    mean = np.empty_like(values)
    divisor = np.array([size], values.dtype)
    program = program_array(plan.root)
    rows = RowsToSum(values.reshape(1, -1), [[span] for span in spans], plan.group_programs, "mean")
    for piece in ExactExchange(comm).pieces(rows):
        out = mean[piece.target : piece.target + piece.size]
        tree_sum(piece.rows, piece.first, program, divisor, out)
    own = spans[comm.rank]
    gather_spans(comm, [mean[own.start : own.stop]], mean, [[span] for span in spans])
    return mean
