"""Keep the best parameters of an optimization, sharded as the model's own are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpizero.errors import ArgumentError
from mpizero.parallel.model.gather_state import gather_owned
from mpizero.types import Array

if TYPE_CHECKING:
    from mpizero.parallel.model.base import ShardedModelBase


class BestParameters:
    """Keep a copy of a model's parameters: of what this rank owns where ranks hold parts, else of all.

    Parameters
    ----------
    model : ShardedModelBase
        Whose parameters are kept as they are now.
    """

    def __init__(self, model: ShardedModelBase) -> None:
        self._model: ShardedModelBase | None = model
        self.take()

    def take(self) -> None:
        """Keep the model's parameters as they are now. Not collective."""
        assert self._model is not None
        whole = self._model.engine.whole
        self._whole: Array | None = None if whole.gathers else whole.vector()
        self._owned: Array | None = self._model.local_parameter_shard if whole.gathers else None

    def give_back(self) -> None:
        """Make what is kept the model's parameters again. Collective over its ranks."""
        assert self._model is not None
        if self._owned is None:
            assert self._whole is not None
            self._model.set_parameters(self._whole)
            return
        store = self._model.engine.store
        store.memory.barrier("best")  # ranks that still read, read the old values
        for unit, span, offset in zip(store.layout.units, store.share.spans, store.share.offsets, strict=True):
            store.owned(unit.index)[:] = self._owned[offset : offset + span.size]
        store.publish()
        self._model.invalidate_cache()

    @property
    def nbytes(self) -> int:
        """Return the bytes that this rank keeps."""
        return sum(values.nbytes for values in (self._whole, self._owned) if values is not None)

    def gathered(self) -> Array:
        """Return all parameters; the first time, collective over the model's ranks where their strategy shards them."""
        if self._model is not None and self._model.shards_parameters:
            self._model._check_call("best_parameters")
        if self._whole is None:
            assert self._model is not None
            assert self._owned is not None
            self._whole = gather_owned(self._model.engine, self._owned)
        self._model = self._owned = None
        return self._whole

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle: the gathered parameters.

        Raises
        ------
        TypeError
            If they are spread over the ranks.
        """
        if self._whole is None:
            raise ArgumentError(
                "the best parameters are spread over the ranks: ask for best_parameters on all of them first"
            )
        return {"_model": None, "_owned": None, "_whole": self._whole}
