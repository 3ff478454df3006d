"""Keep a copy of the best parameters found by ``optimizer.optimize``, sharded like the parameters of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.errors import ArgumentError
from mpizero.parallel.model.gather_state import gather_owned
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class BestParameters:
    """Keep a copy of a model's parameters and integer arrays.

    Each rank copies the ranges that it owns if parameters are sharded or split over ranks, else all parameters; and the
    integer arrays of its stage.

    Parameters
    ----------
    model : ShardedModelBase
        The model; the constructor copies its present parameters.
    """

    def __init__(self, model: ShardedModelBase) -> None:
        self._model: ShardedModelBase | None = model
        self.take()

    def take(self) -> None:
        """Replace the copy by the model's present parameters. Not collective."""
        assert self._model is not None
        whole = self._model.engine.whole
        self._whole: Array | None = None if whole.gathers else whole.vector()
        self._owned: Array | None = self._model.local_parameter_shard if whole.gathers else None
        self._integers = {name: value.copy() for name, value in self._model.engine.integers.values.items()}

    def give_back(self) -> None:
        """Set the model's parameters and integer arrays to the copy. Collective over the model's ranks."""
        assert self._model is not None
        self._model.engine.integers.set(self._integers)
        if self._owned is None:
            assert self._whole is not None
            self._model.set_parameters(self._whole)
            return
        store = self._model.engine.store
        store.memory.barrier("best")  # other ranks may still read the old values in the shared window
        for unit, span, offset in zip(store.layout.units, store.share.spans, store.share.offsets, strict=True):
            store.owned(unit.index)[:] = self._owned[offset : offset + span.size]
        store.publish()
        self._model.engine.begin_average()
        self._model.invalidate_cache()

    @property
    def nbytes(self) -> int:
        """The size of this rank's copy in bytes."""
        kept = (self._whole, self._owned, *self._integers.values())
        return sum(values.nbytes for values in kept if values is not None)

    def gathered(self) -> Array:
        """Return the kept parameters of the whole model, as a 1-D array in declared order.

        The first call is collective over the model's ranks if parameters are sharded or split; later calls are not.
        """
        if self._model is not None and self._model.shards_parameters:
            self._model._check_call("best_parameters")
        if self._whole is None:
            assert self._model is not None
            assert self._owned is not None
            self._whole = gather_owned(self._model.engine, self._owned)
        self._model = self._owned = None
        return self._whole

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the parameters of the whole model, without the model object.

        Raises
        ------
        TypeError
            If this rank has only a part of them, because :meth:`gathered` was not called yet.
        """
        if self._whole is None:
            raise ArgumentError(
                "the best parameters are spread over the ranks: ask for best_parameters on all of them first"
            )
        return {"_model": None, "_owned": None, "_whole": self._whole, "_integers": self._integers}
