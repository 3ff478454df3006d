"""Gather an array with one element for each parameter element of the whole model from the ranges that ranks own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from mpizero.comm.reduce.exact import gather_spans
from mpizero.parallel.engine import Engine
from mpizero.parallel.parameters.shards import Share, UpdatePiece
from mpizero.types import Array


def gather_pieces(engine: Engine, dtype: Any, values: Callable[[UpdatePiece], Any]) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. It is 0 for frozen and averaged parameters.
    Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model, with a bound optimizer.
    dtype : dtype
        Element type of the result.
    values : callable
        Called with each :class:`UpdatePiece` (a range of one parameter) that this rank owns. It returns the numbers for
        this range: an array as long as the range, or one number for all of it.
    """
    full = np.zeros(engine.layout.size, dtype)
    for piece in engine.pieces():
        full[piece.span.start : piece.span.stop] = values(piece)
    return _gathered(engine, full)


def gather_owned(engine: Engine, owned: Array) -> Array:
    """Gather one number for each parameter element of the whole model, from the ranks that own the elements.

    Return the same 1-D array in declared order on every rank. Collective over the world.

    Parameters
    ----------
    engine : Engine
        Engine of the model.
    owned : 1-D array
        This rank's numbers: one for each element of the ranges that it owns, one range after the other.
    """
    full, share = np.empty(engine.layout.size, owned.dtype), engine.store.share
    for span, offset in zip(share.spans, share.offsets, strict=True):
        full[span.start : span.stop] = owned[offset : offset + span.size]
    return _gathered(engine, full)


def _gathered(engine: Engine, full: Array) -> Array:
    """Gather an array from the ranges that ranks own; return it in the order of the whole model. Collective.

    ``full`` has one element for each parameter element of this rank's data group. Only the ranges that this rank owns
    are valid before the call.
    """
    layout, data = engine.layout, engine.grid.data
    spans = [Share(layout, rank, data.size).spans for rank in range(data.size)]
    gather_spans(data, [full[s.start : s.stop] for s in spans[data.rank]], full, spans)
    return engine.whole.assemble(full)
