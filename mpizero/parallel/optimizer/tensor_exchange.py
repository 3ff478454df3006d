"""Exchange the elements of whole tensors between the ranks that hold them and the rank that owns the tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpizero.comm import Request
from mpizero.parallel.optimizer.tensor_plan import Move, TensorPlan
from mpizero.parallel.parameters.shards import UpdatePiece
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array

#: Returns a view of the elements of a move.
_View = Callable[[Move], Array]
#: Returns the index of a piece's first element in an array that is kept in pieces.
PlaceOf = Callable[[UpdatePiece], int]


class TensorExchange:
    """Gather arrays of whole tensors on their owners, and send arrays of owned tensors to their holders.

    Methods that send are collective over the data group. MPI tags tell messages apart that are in flight at a time.

    Parameters
    ----------
    store : ParameterStore
        The parameters.
    plan : TensorPlan
        The tensors and their owners.
    pieces : sequence of UpdatePiece
        The ranges of all parameters that this rank updates.
    """

    def __init__(self, store: ParameterStore, plan: TensorPlan, pieces: Sequence[UpdatePiece]) -> None:
        self.store, self.plan, self.data = store, plan, store.grid.data
        self.owned = plan.owned(self.data.rank)
        self._places = {piece.span: piece for piece in pieces if piece.entry.spec.name in plan.names}

    def begin_gather(self, values: Array, place_of: PlaceOf, tag: int) -> tuple[dict[int, Array], list[Request]]:
        """Begin to gather tensors of which every rank holds pieces in ``values``, at the places ``place_of``.

        Return new flat arrays for the tensors that this rank owns, by number, complete when the requests have ended.
        """
        whole = {number: np.empty(self.plan.tensors[number].spec.size, values.dtype) for number in self.owned}
        moves = self.plan.gathers(self.data.rank)
        return whole, self._exchange(moves, tag, self._in_pieces(values, place_of), self._inside(whole))

    def begin_parameters(self, tag: int) -> tuple[dict[int, Array], list[Request]]:
        """Begin to gather the values of the parameters, as :meth:`begin_gather`; replicated ones are copied."""
        values = self.store.values
        if self.store.sharded:
            return self.begin_gather(values, lambda piece: piece.store, tag)
        spans = {number: self.plan.tensors[number].span for number in self.owned}
        return {number: values[span.start : span.stop].copy() for number, span in spans.items()}, []

    def send_back(self, whole: Mapping[int, Array], values: Array, place_of: PlaceOf, tag: int) -> None:
        """Write the elements of owned tensors to the pieces in ``values`` of all ranks that hold them."""
        moves = self.plan.returns(self.data.rank)
        for request in self._exchange(moves, tag, self._inside(whole), self._in_pieces(values, place_of)):
            request.wait()

    def _inside(self, tensors: Mapping[int, Array]) -> _View:
        return lambda move: _held(tensors[move.tensor], move.span.start - self.plan.tensors[move.tensor].offset, move)

    def _in_pieces(self, values: Array, place_of: PlaceOf) -> _View:
        return lambda move: _held(values, place_of(self._places[move.span]), move)

    def _exchange(self, moves: Sequence[Move], tag: int, source: _View, target: _View) -> list[Request]:
        """Begin to send elements from the views of ``source`` to those of ``target`` on other ranks; copy own ones.

        Messages between two ranks arrive in the order of their moves, which both know.
        """
        requests = []
        for move in moves:
            if move.source == move.target:
                target(move)[:] = source(move)
            elif move.source == self.data.rank:
                requests.append(self.data.isend(source(move), move.target, tag))
            else:
                requests.append(self.data.irecv(target(move), move.source, tag))
        return requests


def _held(values: Array, start: int, move: Move) -> Array:
    return values[start : start + move.span.size]
