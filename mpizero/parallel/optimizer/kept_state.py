"""Tell which elements of which arrays of optimizer state a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mpizero.optim.elementwise import EMA, tensor_slots
from mpizero.parallel.optimizer.whole_tensors import WholeTensors
from mpizero.parallel.parameters.shards import StatePiece, UpdatePiece, UpdateRun


def state_sizes(
    optimizer: Any, size: int, elementwise: Iterable[UpdateRun], tensors: WholeTensors | None
) -> dict[str, int]:
    """Return the number of elements that a rank keeps of each slot of the optimizer state. Not collective.

    A whole tensor has state of its own; of the arrays that are as long as the parameters it has only the average.

    Parameters
    ----------
    optimizer : optimizer
        What :func:`mpizero.optim.elementwise.averaging` returns.
    size : int
        Number of parameter elements that the rank updates.
    elementwise : iterable of UpdateRun
        Those that it does not update as parts of whole tensors.
    tensors : WholeTensors or None
        The whole tensors; None if the optimizer needs none.
    """
    short = sum(run.size for run in elementwise)
    sizes = {slot: size if slot == EMA else short for slot in optimizer.slots}
    return sizes | {slot: tensors.size(slot) if tensors else 0 for slot in tensor_slots(optimizer)}


def sharded_pieces(pieces: Iterable[UpdatePiece], size: int) -> list[StatePiece]:
    """Return which elements of a slot's arrays a rank keeps of ``pieces``, which follow the shard rule. Not collective.

    ``size`` is the number of elements that the rank keeps of the slot. Pieces of whole tensors, which only the average
    has, begin after it (:func:`~mpizero.parallel.parameters.shards.whole_last`).
    """
    held = (piece for piece in pieces if piece.state + piece.size <= size)
    return [StatePiece(p.entry.spec, p.span.start - p.entry.offset, p.state, p.size) for p in held]
