"""Update whole tensors, each on the rank that owns it; results do not depend on the layout.

[Note: whole tensors] Some optimizers need a tensor at a time: Muon makes its momentum orthogonal, SOAP needs
eigenvectors of it. The shard rule cuts tensors anywhere. So tensors are divided over the data ranks by their costs, the
same on every layout with as many ranks. The ranks that hold elements of a tensor's reduced gradient send them to its
owner. The owner, which alone keeps the tensor's state, updates the whole tensor and sends the new values to all ranks
that hold elements of the parameter. There they are written as any update is, and published. An owner computes with
arrays of the tensor's own shape, so no bit depends on the number of ranks or on how shards are cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpizero.comm.agreement import all_ranks
from mpizero.errors import ArgumentError
from mpizero.optim.elementwise import optimizer_name, state_specs
from mpizero.parallel.optimizer.tensor_exchange import TensorExchange
from mpizero.parallel.optimizer.tensor_plan import TensorPlan
from mpizero.parallel.optimizer.tied_parameters import home_of
from mpizero.parallel.parameters.shards import StatePiece, UpdatePiece
from mpizero.parallel.parameters.store import ParameterStore
from mpizero.types import Array

#: MPI tags of messages with elements of gradients, of parameters, and of updated parameters.
_GRADIENT, _PARAMETER, _UPDATED = 1, 2, 3


class WholeTensors:
    """Exchange the elements of whole tensors with their owners, and update those that this rank owns.

    Parameters
    ----------
    optimizer : TensorOptimizer
        What :func:`mpizero.optim.elementwise.averaging` returns for one.
    store, plan, pieces
        As in :class:`.TensorExchange`.
    """

    def __init__(self, optimizer: Any, store: ParameterStore, plan: TensorPlan, pieces: Sequence[UpdatePiece]) -> None:
        self.optimizer, self.store, self.plan = optimizer, store, plan
        self.exchange = TensorExchange(store, plan, pieces)
        self.owned = self.exchange.owned
        self.pieces = [piece for piece in pieces if piece.entry.spec.name in plan.names]
        self.kept = {slot: self._kept(slot) for slot in optimizer.tensor_slots}

    def _kept(self, slot: str) -> list[StatePiece]:
        """Return the arrays of this rank's state in ``slot``: one for each owned tensor that has it."""
        found, place = list[StatePiece](), 0
        for number in self.owned:
            spec = state_specs(self.optimizer, self.plan.tensors[number].spec).get(slot)
            if spec is not None:
                found.append(StatePiece(spec, 0, place, spec.size))
                place += spec.size
        return found

    def size(self, slot: str) -> int:
        """Return the number of elements of this rank's state in ``slot``. Not collective."""
        return sum(piece.size for piece in self.kept[slot])

    def update(self, reduced: Array, hypers: Mapping[int, Array], state: Mapping[str, Array]) -> None:
        """Update all whole tensors from the reduced gradient. Collective over all ranks.

        Parameters are written where this rank updates them: in the ranges of :attr:`pieces`.

        Parameters
        ----------
        reduced : 1-D array
            The reduced gradient; complete in the ranges that this rank updates.
        hypers : mapping of int to Array
            The hyperparameters of each optimizer group.
        state : mapping of str to Array
            This rank's optimizer state, by slot.

        Raises
        ------
        Exception
            What ``update_tensor`` raised, on the owner of the tensor; RemoteError on all other ranks, those of other
            pipeline stages included. No parameter has changed then.
        """
        gradients, requests = self.exchange.begin_gather(reduced, lambda piece: piece.gradient, _GRADIENT)
        values, more = self.exchange.begin_parameters(_PARAMETER)
        for request in requests + more:
            request.wait()
        with all_ranks(self.store.grid.world, "whole tensors"):
            for number in self.owned:
                self._update_one(number, values[number], gradients[number], hypers, state)
        self.exchange.send_back(values, self.store.values, lambda piece: piece.store, _UPDATED)

    def _update_one(
        self, number: int, w: Array, g: Array, hypers: Mapping[int, Array], state: Mapping[str, Array]
    ) -> None:
        spec = self.plan.tensors[number].spec
        group = self.optimizer.group_of(replace(spec, name=home_of(spec)))
        step = self.optimizer.tensor_step(hypers[group])
        arrays = {
            slot: state[slot][p.state : p.state + p.size].reshape(p.spec.shape)
            for slot, kept in self.kept.items()
            for p in kept
            if p.spec.name == spec.name
        }
        try:
            result = self.optimizer.update_tensor(w.reshape(spec.shape), g.reshape(spec.shape), arrays, step)
        except Exception as error:
            error.add_note(f"In the update of parameter {home_of(spec)!r} of shape {spec.shape}, step {step.number}")
            raise
        if result is not None:
            raise ArgumentError(
                f"{optimizer_name(self.optimizer)}.update_tensor returned {type(result).__name__} for "
                f"{home_of(spec)!r}; expected None: change w and the arrays of state in place"
            )
