"""Arrays of the whole model from what each rank has for the ranges it owns: optimizer state, gradients, owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.comm.exact import gather_spans
from mpizero.parallel.engine import Engine
from mpizero.parallel.ownership import Share, UpdatePiece
from mpizero.types import Array


def gather_pieces(engine: Engine, dtype: Any, values: Callable[[UpdatePiece], Any]) -> Array:
    """Return a 1-D array in the declared order of the whole model, the same on every rank; zeros where frozen.

    Collective over the world.

    Parameters
    ----------
    engine : Engine
        With a bound optimizer.
    dtype : dtype
        Of the result.
    values : callable
        Returns what this rank has for one of its own pieces: an array as long as the piece, or one number.
    """
    layout, data = engine.layout, engine.grid.data
    spans = [Share(layout, rank, data.size).spans for rank in range(data.size)]
    full = np.zeros(layout.size, dtype)
    for piece in engine.pieces():
        full[piece.span.start : piece.span.stop] = values(piece)
    gather_spans(data, [full[s.start : s.stop] for s in spans[data.rank]], full, spans)
    return engine.whole.assemble(full)
