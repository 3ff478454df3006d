"""Gather arrays of the whole model from the ranges that ranks own: optimizer state, gradients, owners."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.comm.reduce.exact import gather_spans
from mpizero.parallel.engine import Engine
from mpizero.parallel.parameters.shards import Share, UpdatePiece
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
    full = np.zeros(engine.layout.size, dtype)
    for piece in engine.pieces():
        full[piece.span.start : piece.span.stop] = values(piece)
    return _gathered(engine, full)


def gather_owned(engine: Engine, owned: Array) -> Array:
    """Return a 1-D array in the declared order of the whole model, the same on every rank. Collective over the world.

    Parameters
    ----------
    engine : Engine
        Whose layout it is.
    owned : 1-D array
        What this rank has for the concatenation of the ranges that it owns.
    """
    full, share = np.empty(engine.layout.size, owned.dtype), engine.store.share
    for span, offset in zip(share.spans, share.offsets, strict=True):
        full[span.start : span.stop] = owned[offset : offset + span.size]
    return _gathered(engine, full)


def _gathered(engine: Engine, full: Array) -> Array:
    """Fill the ranges of the other ranks, and arrange all in the order of the whole model."""
    layout, data = engine.layout, engine.grid.data
    spans = [Share(layout, rank, data.size).spans for rank in range(data.size)]
    gather_spans(data, [full[s.start : s.stop] for s in spans[data.rank]], full, spans)
    return engine.whole.assemble(full)
