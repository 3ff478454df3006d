"""Average an array over ranks; how the ranks are distributed over nodes does not change the bits."""

from __future__ import annotations

import numpy as np

from mpizero.comm import Communicator
from mpizero.comm.reduce.exact import ExactExchange, RowsToSum, gather_spans
from mpizero.comm.reduce.segments import program_array, tree_sum
from mpizero.layout import Partition, Span
from mpizero.layout.sum_tree import rows_plan
from mpizero.types import Array


def mean_over_ranks(comm: Communicator, values: Array) -> Array:
    """Return the elementwise mean over the ranks of the 1-D array ``values``. Collective over ``comm``.

    The arrays are added in the order of one binary tree over the ranks.
    """
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
